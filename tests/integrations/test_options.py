"""LaunchOptions is the command line's table, typed."""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

import pytest

from ft_launcher import cli
from ft_launcher.edge.table import OPTIONS
from ft_launcher.errors import ConfigError
from ft_launcher.integrations.options import LaunchOptions, field_name

EXAMPLES: dict[str, tuple[Any, list[str]]] = {
    "node_label": ({"rack": "r1", "room": "b"}, ["--node-label", "rack=r1", "--node-label", "room=b"]),
    "timeouts": ({"setup": 900, "step": 0.5}, ["--timeouts", "setup=900,step=0.5"]),
    "preload": ([], ["--preload", "none"]),
    "forward_signals": (["USR1", "HUP"], ["--forward-signals", "USR1,HUP"]),
    "learn_timeouts": (False, ["--fixed-timeouts"]),
    "max_restarts": (0, ["--max-restarts", "0"]),
    "survivor_grace": (0.0, ["--survivor-grace", "0"]),
    "store_timeout": (1234567.5, ["--store-timeout", "1234567.5"]),
    "health_check": ("nvidia-smi -q | grep ok", ["--health-check", "nvidia-smi -q | grep ok"]),
}


def test_every_option_of_the_command_line_is_a_field_and_no_other() -> None:
    fields = [field.name for field in dataclasses.fields(LaunchOptions)]
    assert fields == [*map(field_name, OPTIONS), "config"], "keep LaunchOptions and the table of options together, in the table's order"


def test_fields_are_typed_and_say_nothing_by_default() -> None:
    hints = get_type_hints(LaunchOptions)
    assert all(type(None) in hints[field.name].__args__ and field.default is None for field in dataclasses.fields(LaunchOptions))
    assert [name for name in OPTIONS if OPTIONS[name].off and bool not in hints[field_name(name)].__args__] == []
    assert LaunchOptions().flags() == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_values_become_flags(name: str) -> None:
    value, flags = EXAMPLES[name]
    options = LaunchOptions(**{name: value})
    options.check()
    assert options.flags() == flags


def test_the_command_line_takes_what_is_made_of_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    options = LaunchOptions(
        tp=2,
        nnodes=1,
        nproc_per_node=4,
        run_id="r",
        tee="0,3",
        preload=[],
        **{n: v for n, (v, _) in EXAMPLES.items() if n not in ("preload", "health_check")},
    )
    options.check()
    assert cli.run([*options.flags(), "--dry-run", "-m", "json.tool"]) == 0
    shown = capsys.readouterr().out
    for text in ("2 (flag)", "setup=900,step=0.5,checkpointing=420 (flag)", "rack=r1,room=b (flag)", "USR1,HUP (flag)"):
        assert text in shown


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tp": 3, "nnodes": 1, "nproc_per_node": 4}, "--tp 3: does not divide the world of 4 ranks"),
        ({"tp": "x"}, "tp 'x': must be a whole number"),
        ({"max_restarts": -1}, "max_restarts '-1': must be a whole number"),
        ({"max_restarts": True}, "max_restarts 'true': must be a whole number"),
        ({"learn_timeouts": "perhaps"}, "learn_timeouts 'perhaps': must be true or false"),
        ({"timeouts": {"stpe": 3}}, "stpe"),
        ({"preload": object()}, "must be a text, a number, a list of texts or a mapping"),
        ({"tee": "0,9", "nnodes": 1, "nproc_per_node": 2}, "unknown rank 9"),
        ({"store": "redis://x"}, "store 'redis://x'"),
    ],
)
def test_a_mistake_is_one_line_where_the_recipe_is_written(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LaunchOptions(**given).check()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_only_the_place_knows_is_not_complained_about() -> None:
    LaunchOptions(tp=64, nproc_per_node="gpu", tee="0,500", preload=["megatron.core"], store_user="me").check()
    LaunchOptions(nnodes="4:6", nproc_per_node=8, tp=8).check(["--pipeline-model-parallel-size", "4"])
    with pytest.raises(ConfigError, match="several nodes need --store"):
        LaunchOptions(nnodes=2, nproc_per_node=1).check(environ={})
    LaunchOptions(nnodes=2, nproc_per_node=1, run_id="r").check(environ={"FT_STORE": "etcd://s:2379"})
