"""The wire: what clients of all versions send is understood, what we send is understood by them, and nothing else is let in."""

from __future__ import annotations

import os
import pickle
import pickletools
import subprocess
import sys
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monitors import nvrx_wire as wire
from monitors.nvrx_pickle import MAX_STEPS, MODULE
from tests.nvrx import frames
from tests.nvrx.frames import SectionAction, WorkloadAction, pickled


@pytest.mark.parametrize("protocol", [4, 5])
def test_every_message_of_0_4(protocol: int) -> None:
    def read(value: object) -> wire.Message:
        return wire.decode(pickled(value, protocol))

    assert read(frames.authkey()) == wire.AuthkeyMsg()
    assert read(frames.init("3")) == wire.InitMsg(rank=3, pid=4711, reads_skip=False, warmup_iters=None)
    assert read(frames.heartbeat()) == wire.HeartbeatMsg()
    assert read(frames.section("step", SectionAction.OPEN)) == wire.SectionMsg("step", wire.SectionAction.OPEN)
    assert read(frames.section("step", SectionAction.CLOSE)) == wire.SectionMsg("step", wire.SectionAction.CLOSE)
    assert read(frames.section(None, SectionAction.CLOSE_ALL)) == wire.SectionMsg(None, wire.SectionAction.CLOSE_ALL)
    told = frames.update(
        frames.section_timeouts({"step": 1.5, "x": None}, 3),
        frames.thing("HeartbeatTimeouts", initial=9.0, subsequent=2.0, were_calculated=True),
    )
    assert read(told) == wire.UpdateConfigMsg({"step": 1.5}, 3.0, 2.0)
    assert read(frames.update()) == wire.UpdateConfigMsg()
    asked = read(frames.request(WorkloadAction.ExcludeThisNode, "ECC\x1b[31m"))
    assert asked == wire.WorkloadControlRequest(3, wire.WorkloadAction.ExcludeThisNode, "ECC [31m")


def test_what_0_6_adds() -> None:
    assert wire.decode(pickled(frames.new_init(3, 1, None))) == wire.InitMsg(3, 4711, reads_skip=True, warmup_iters=None)
    assert wire.decode(pickled(frames.new_init(3, None, 7))) == wire.InitMsg(3, 4711, reads_skip=True, warmup_iters=7)
    message = wire.decode(pickled(frames.section("step", SectionAction.CLOSE, iteration=70_000)))
    assert message == wire.SectionMsg("step", wire.SectionAction.CLOSE, 70_000)
    assert wire.decode(pickled(frames.update(current_cycle=3))) == wire.UpdateConfigMsg()


def test_an_attribute_of_a_version_to_come_changes_nothing() -> None:
    message = frames.section("step", SectionAction.OPEN, iteration=None, colour={"deep": [1, (2.5, True, b"x")]}, big=1 << 200)
    assert wire.decode(pickled(message)) == wire.SectionMsg("step", wire.SectionAction.OPEN)


def test_an_enum_that_is_pickled_by_name() -> None:
    """As Python 3.11.0 to 3.11.3 do."""
    by_value = pickled(frames.section("step", SectionAction.CLOSE))
    made = pickled(SectionAction.CLOSE)
    assert b"\x8c\x0dSectionAction\x94\x93\x94K\x02\x85\x94R" in made
    ops = (
        b"\x80\x04\x8c" + bytes([len(MODULE)]) + MODULE.encode() + b"\x8c\x0aSectionMsg\x93)\x81}(\x8c\x07section\x8c\x04step\x8c\x06action"
        b"\x8c\x08builtins\x8c\x07getattr\x93\x8c"
        + bytes([len(MODULE)])
        + MODULE.encode()
        + b"\x8c\x0dSectionAction\x93\x8c\x05CLOSE\x86Rub."
    )
    assert wire.decode(ops) == wire.decode(by_value)


def test_frames_are_cut_wherever_the_stream_is_split() -> None:
    messages = [pickled(frames.heartbeat()), pickled(frames.section("step", SectionAction.OPEN)), b"x"]
    stream = b"".join(wire.frame(m) for m in messages)
    for size in (1, 2, 3, 5, 64, len(stream)):
        buffer, found = wire.FrameBuffer(), []
        for at in range(0, len(stream), size):
            found += buffer.feed(stream[at : at + size])
        assert found == messages
        assert buffer.pending == 0


@pytest.mark.parametrize("length", [0, wire.MAX_FRAME_BYTES + 1, 0x47455420, 0xFFFFFFFF])  # the third is "GET "
def test_a_length_that_no_message_has_is_refused_at_once(length: int) -> None:
    with pytest.raises(wire.RefusedError, match=f"a frame of {length} bytes"):
        wire.FrameBuffer().feed(length.to_bytes(4, "big"))


def test_slow_bytes_are_held_up_to_one_frame() -> None:
    buffer = wire.FrameBuffer()
    assert buffer.feed(wire.MAX_FRAME_BYTES.to_bytes(4, "big")) == []
    for _ in range(wire.MAX_FRAME_BYTES - 1):
        assert buffer.feed(b"x") == []
    assert buffer.pending == wire.MAX_FRAME_BYTES + 3
    assert len(buffer.feed(b"x")) == 1


class _Gadget:
    def __reduce__(self) -> tuple[object, ...]:
        return (os.system, ("touch /tmp/should-never-exist",))


def _class_op(module: str, name: str) -> bytes:
    return b"\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93"


_ACTION = _class_op(MODULE, "SectionAction")
HOSTILE = {
    "a call of os.system": pickle.dumps(_Gadget()),
    "a call of os.system, protocol 0": pickle.dumps(_Gadget(), 0),
    "eval": b"\x80\x04" + _class_op("builtins", "eval") + b"\x8c\x011\x85R.",
    "a dotted name": b"\x80\x04" + _class_op(MODULE, "dist.sys.modules") + b").",
    "another name of the module": b"\x80\x04" + _class_op(MODULE, "os") + b")\x81.",
    "getattr of a class's method": b"\x80\x04" + _class_op("builtins", "getattr") + _ACTION + b"\x8c\x05mro()\x86R}b.",
    "getattr of something else": b"\x80\x04" + _class_op("builtins", "getattr") + b"\x8c\x01x\x8c\x05upper\x86R.",
    "a class that is called": b"\x80\x04" + _class_op(MODULE, "InitMsg") + b"K\x01\x85R.",
    "a class with arguments": b"\x80\x04" + _class_op(MODULE, "InitMsg") + b"K\x01\x85\x81.",
    "an enum member that is a list": b"\x80\x04" + _ACTION + b"]\x85R.",
    "state that is no dictionary": b"\x80\x04" + _class_op(MODULE, "InitMsg") + b")\x81]b.",
    "state for a list": b"\x80\x04]}b.",
    "a huge memo index": b"\x80\x04Nr" + (1 << 25).to_bytes(4, "little") + b".",
    "a memo that is not there": b"\x80\x04h\x07.",
    "a key of nested tuples": b"\x80\x04})" + b"\x85" * 5000 + b"Ns.",
    "a set of nested tuples": b"\x80\x04\x8f()" + b"\x85" * 5000 + b"\x90.",
    "a huge text": b"\x80\x04X\xff\xff\xff\xff.",
    "huge bytes": b"\x80\x04\x8e" + b"\xff" * 8 + b".",
    "a persistent id": b"\x80\x04Pabc\n.",
    "an extension code": b"\x80\x04\x82\x01.",
    "too many steps": b"\x80\x04" + b"N0" * MAX_STEPS + b"N.",
    "too many values": b"\x80\x04" + b"N" * (MAX_STEPS + 1) + b".",
    "marks only": b"\x80\x04" + b"(" * 100 + b".",
    "a pop from nothing": b"\x80\x04u.",
    "a tuple of nothing": b"\x80\x04\x87.",
    "two values": b"\x80\x04NN.",
    "something after the end": b"\x80\x04N.N.",
    "no end": b"\x80\x04N",
    "nothing": b"",
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "not utf-8": b"\x80\x04\x8c\x02\xff\xfe.",
    "another protocol": b"\x80\x7fN.",
    "no message": pickle.dumps({"a": 1}),
    "an inner class on its own": pickled(frames.thing("RankInfo", global_rank=1)),
    "a section without a name": pickled(frames.section(None, SectionAction.OPEN)),
    "a section with a number for a name": pickled(frames.section(5, SectionAction.OPEN)),  # type: ignore[arg-type]
    "a section with an endless name": pickled(frames.section("x" * 201, SectionAction.OPEN)),
    "a section without an action": pickled(frames.thing("SectionMsg", section="step", action=1)),
    "a section with a workload's action": pickled(frames.thing("SectionMsg", section="step", action=WorkloadAction.Continue)),
    "timeouts that are a list": pickled(frames.update(frames.section_timeouts(["step"]))),
    "timeouts of another class": pickled(frames.update(frames.thing("RankInfo"))),
    "a pair of anything": pickled((1, 2)),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_message_is_refused_and_does_nothing(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(wire.RefusedError):
            wire.decode(data)
        assert tracemalloc.get_traced_memory()[1] < 8_000_000
    finally:
        tracemalloc.stop()
    assert not os.path.exists("/tmp/should-never-exist")


def test_values_that_make_no_sense_are_left_out() -> None:
    bad = {"a": -1.0, "b": float("nan"), "c": float("inf"), "d": True, "e": "5", "f": 1 << 300, "g": 7, "h": [1]}
    assert wire.decode(pickled(frames.update(frames.section_timeouts(bad, "x")))) == wire.UpdateConfigMsg({"g": 7.0})
    looped: list[object] = []
    looped += [looped, looped]
    asked = wire.decode(pickled(frames.request(WorkloadAction.Continue, looped)))
    assert isinstance(asked, wire.WorkloadControlRequest)
    assert asked.description == ""
    assert wire.decode(pickled(frames.init("three"))) == wire.InitMsg(None, 4711, False, None)
    assert wire.decode(pickled(frames.init(-1))) == wire.InitMsg(None, 4711, False, None)


@given(st.binary(max_size=300))
@settings(max_examples=400)
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    for body in (data, b"\x80\x04" + data + b"."):
        try:
            wire.decode(body)
        except wire.RefusedError:
            pass


@given(st.data())
@settings(max_examples=400)
def test_a_damaged_message_is_a_message_or_refused(data: st.DataObject) -> None:
    whole = bytearray(pickled(frames.update(frames.section_timeouts({"step": 1.5, "x": None}, 3.0))))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        wire.decode(bytes(whole))
    except wire.RefusedError:
        pass


def test_what_we_send_needs_no_constructor_and_names_only_their_classes() -> None:
    """Seen with the standard library's disassembler: every look-up is one of theirs, and no call is made (a constructor of another version might refuse)."""
    config = {"rank_section_timeouts": {"step": 1.0, "é": None}, "skip_section_response": True, "n": -5, "text": "x"}
    for sent in (wire.OK, wire.error("why"), wire.welcome(config), wire.REQUEST_OK):
        assert int.from_bytes(sent[:4], "big") == len(sent) - 4
        ops = [(op.name, arg) for op, arg, _ in pickletools.genops(sent[4:])]
        assert not {"REDUCE", "INST", "OBJ"} & {name for name, _ in ops}
        looked_up = {arg for name, arg in ops if name == "GLOBAL"}
        assert looked_up <= {f"{MODULE} OkMsg", f"{MODULE} ErrorMsg", "nvidia_resiliency_ext.fault_tolerance.config FaultToleranceConfig"}


READ_BACK = """
import pickle, sys
from monitors import nvrx_wire as wire
from nvidia_resiliency_ext.fault_tolerance import FaultToleranceConfig
from nvidia_resiliency_ext.fault_tolerance.data import ErrorMsg, OkMsg
assert type(pickle.loads(wire.OK[4:])) is OkMsg
assert str(pickle.loads(wire.error("why so")[4:])) == "ErrorMsg(why so)"
assert pickle.loads(wire.REQUEST_OK[4:]) == b"ok"
sent = {"rank_section_timeouts": {"step": 1.5, "é": None}, "rank_out_of_section_timeout": None, "safety_factor": 5.0, "skip_section_response": False, "of_2030": "x"}
cfg = pickle.loads(wire.welcome(sent)[4:]).cfg
assert type(cfg) is FaultToleranceConfig and {k: getattr(cfg, k) for k in sent} == sent
assert cfg.workload_check_interval == FaultToleranceConfig().workload_check_interval  # what we do not say is that class's default
repr(cfg), pickle.loads(pickle.dumps(cfg)), cfg.to_yaml_file(sys.argv[1])
"""


def test_the_installed_package_reads_what_we_send(tmp_path: object) -> None:
    pytest.importorskip("nvidia_resiliency_ext.fault_tolerance.config")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", READ_BACK, f"{tmp_path}/cfg.yaml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_reading_and_writing_import_neither_torch_nor_nvrx() -> None:
    code = "import sys, ft_launcher.shell.agent; print([m for m in sys.modules if m.split('.')[0] in ('torch', 'nvidia_resiliency_ext', 'pickle', '_pickle')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch" not in done.stdout
    assert "nvidia" not in done.stdout
