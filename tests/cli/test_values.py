"""One text, one value: what each reader takes and what it refuses."""

from __future__ import annotations

import math
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_launcher.config import StoreOptions
from ft_launcher.edge import values
from ft_launcher.edge.values import BadValueError

REFUSED = {
    values.count(): ["0", "-1", "1.5", "", " 1", "1_000", "٣", "1e3", "9" * 5000, "0x10", "+1"],
    values.seconds(): ["0", "-1", "nan", "NaN", "inf", "-inf", "1e400", "", "ten", "10s", "1_0", "1e10", " 1", "٣"],
    values.seconds(at_least=0): ["-0.1", "nan", "inf"],
    values.hours: ["0", "-1", "nan", "inf", "1e9"],
    values.boolean: ["", "maybe", "2"],
    values.identifier: ["", "a/b", "..", "-x", "a b", "a\nb", "ä", "x" * 201],
    values.node_range: ["0", "2:1", ":", "2:", ":2", "1:2:3", "a"],
    values.endpoint: ["a", "a:", "a:0", "a:65536", ":1", "a:b", "[::1]", "::1:1", "a b:1", "http://a:1", "a:1/x", "u:p@a:1"],
    values.address: ["", "a:0", "a:99999", "a:b", "a b", "-a", "a/b"],
    values.store: [
        "",
        "etcd",
        "etcd://",
        "etcd://a",
        "etcd://a:1,",
        "etcd://a:1,,b:1",
        "etcd://u:p@a:1",
        "http://a:1",
        "redis",
        "etcd://a:1/x",
        "memory://",
    ],
    values.timeouts: [
        "",
        "setup",
        "setup=",
        "=5",
        "setup=-1",
        "setup=0",
        "setup=nan",
        "setup=inf",
        "stpe=5",
        "foo=5",
        "setup=1,",
        "setup=1,setup=2",
        "+=1",
        "+a b=1",
    ],
    values.labels: ["", "a", "a=", "=b", "a=b,", "a=b,a=c", "a b=c", "a=b\nc", "a=" + "x" * 300],
    values.signals: ["", "KILL", "SIGSTOP", "TERM", "INT", "2", "9", "CHLD", "SEGV", "USR3", "999", "-1", "USR1,"],
    values.tee: ["", "some", "-1", "0,", "1.5", "all,0"],
    values.modules: ["", "a b", "1x", "a,", "a..b", "../x", "torch;x"],
    values.nonempty: ["", "  ", "a\0b"],
    values.choice("fork", "spawn"): ["", "forkserver", "FORK"],
}


@pytest.mark.parametrize(("reader", "text"), [(reader, text) for reader, texts in REFUSED.items() for text in texts])
def test_refused(reader: object, text: str) -> None:
    with pytest.raises(BadValueError) as caught:
        reader(text)  # type: ignore[operator]
    assert "\n" not in str(caught.value)


def test_taken() -> None:
    assert values.count()("007") == 7
    assert values.count(0)("0") == 0
    assert values.seconds()("1e-3") == 0.001
    assert values.seconds(at_least=0)("0") == 0
    assert values.node_range("4:6") == (4, 6)
    assert values.node_range("4") == (4, None)
    assert values.endpoint("[fe80::1]:2379") == ("fe80::1", 2379)
    assert [values.address(text) for text in ("node-3.cluster", "10.0.0.1:4000", "fe80::1", "[::1]:5")] == [
        "node-3.cluster",
        "10.0.0.1:4000",
        "fe80::1",
        "[::1]:5",
    ]
    assert values.store("memory") == StoreOptions()
    assert values.store("etcd://a:1,[::1]:2,a:1").endpoints == (("a", 1), ("::1", 2))
    assert values.timeouts("setup=1.5, step=2,+my.part=3") == {"setup": 1.5, "step": 2, "my.part": 3}
    assert values.labels("topology/rack=r 1,a=b=c") == {"topology/rack": "r 1", "a": "b=c"}
    assert values.signals("usr1,SIGUSR2,USR1,1") == (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
    assert values.signals("none") == ()
    assert values.modules("torch,megatron.core,torch") == ("torch", "megatron.core")
    assert values.modules("none") == ()
    assert str(values.tee("3,0,3")) == "0,3"
    assert [values.tee(text).shows(1) for text in ("all", "none", "0,1", "0")] == [True, False, True, False]


def test_a_slip_gets_a_hint() -> None:
    for reader, text, hint in (
        (values.timeouts, "chekpointing=5", "did you mean checkpointing?"),
        (values.timeouts, "foo=5", "+foo=5"),
        (values.signals, "USR", "did you mean USR"),
        (values.store, "etc://a:1", "did you mean etcd?"),
    ):
        with pytest.raises(BadValueError) as caught:
            reader(text)
        assert hint in str(caught.value)


@given(st.text())
def test_show_is_one_printable_line(text: str) -> None:
    assert values.show(text).isprintable()
    assert len(values.show(text)) <= 12 * 80


@given(st.text() | st.floats().map(str) | st.integers().map(str))
def test_no_reader_fails_in_another_way(text: str) -> None:
    for reader in REFUSED:
        try:
            value = reader(text)
        except BadValueError:
            continue
        assert not (isinstance(value, float) and not math.isfinite(value))
