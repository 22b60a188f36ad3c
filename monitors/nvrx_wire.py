"""The wire of NVRx's rank monitoring: frames, what a client can say, and what it is answered.

A frame is four bytes of length (big-endian) and one pickle. What arrives is read by `nvrx_pickle` and becomes one of the small classes below, named as NVRx names its
own; what is sent is written here, opcode by opcode, naming classes of a package that this process never imports (it would pull in torch). The configuration is
written as an object with attributes, not as a call of its constructor, so any version takes it: attributes that an older one does not know are simply there, and those
that a newer one has besides keep that class's defaults.

Pure: bytes in, values out. Knows no socket, no clock and no rank. The versions covered are 0.4.1 to 0.7 (docs/nvrx.md).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from monitors.nvrx_pickle import MAX_NAME_CHARS, MODULE, Named, RefusedError, read_pickle

__all__ = ["RefusedError"]

LENGTH_BYTES = 4
MAX_FRAME_BYTES = 1 << 16
"""An `UpdateConfigMsg` with 256 sections of 60 letters takes half of it."""
MAX_WORDS = 300
_CACHED_BYTES = 512
_CONFIG = ("nvidia_resiliency_ext.fault_tolerance.config", "FaultToleranceConfig")
_MAX_SECTIONS = 256
_EMPTY: Mapping[str, float] = MappingProxyType({})


class SectionAction(IntEnum):
    """What happens to a section."""

    OPEN = 1
    CLOSE = 2
    CLOSE_ALL = 3


class WorkloadAction(IntEnum):
    """What a rank asks of the launcher."""

    Continue = 0
    ExcludeThisNode = 1
    ShutdownWorkload = 2


@dataclass(frozen=True, slots=True)
class AuthkeyMsg:
    """The first word of a connection. The key is not kept: nothing here is protected by it."""


@dataclass(frozen=True, slots=True)
class InitMsg:
    """Who it is. `reads_skip`: a client (from 0.6) that certainly reads `cfg.skip_section_response`; `warmup_iters` None: it did not say."""

    rank: int | None
    pid: int | None
    reads_skip: bool
    warmup_iters: int | None


@dataclass(frozen=True, slots=True)
class HeartbeatMsg:
    """The script's loop came by."""


@dataclass(frozen=True, slots=True)
class SectionMsg:
    """A section was opened or closed; `section` is None for all of them."""

    section: str | None
    action: SectionAction
    iteration: int | None = None


@dataclass(frozen=True, slots=True)
class UpdateConfigMsg:
    """Timeouts in seconds that the client has calculated or loaded; what is None, infinite or no number at all is left out."""

    sections: Mapping[str, float] = field(default_factory=lambda: _EMPTY)
    out_of_section_s: float | None = None
    heartbeat_s: float | None = None


@dataclass(frozen=True, slots=True)
class WorkloadControlRequest:
    """What rank `rank` (as it calls itself) asks for, in one printable line."""

    rank: int | None
    action: WorkloadAction
    description: str


Message = AuthkeyMsg | InitMsg | HeartbeatMsg | SectionMsg | UpdateConfigMsg | WorkloadControlRequest


class FrameBuffer:
    """Cuts a stream into pickles. Holds at most one unfinished frame of `MAX_FRAME_BYTES`."""

    def __init__(self) -> None:
        self._data = bytearray()

    @property
    def pending(self) -> int:
        """Bytes of a frame that is not complete."""
        return len(self._data)

    def feed(self, data: bytes) -> list[bytes]:
        """The pickles that are complete now. Raises RefusedError for a length that no message has; the stream is of no use after that."""
        self._data += data
        found, at = [], 0
        while len(self._data) - at >= LENGTH_BYTES:
            size = int.from_bytes(self._data[at : at + LENGTH_BYTES], "big")
            if not 0 < size <= MAX_FRAME_BYTES:
                raise RefusedError(f"a frame of {size} bytes (allowed: 1 to {MAX_FRAME_BYTES})")
            end = at + LENGTH_BYTES + size
            if end > len(self._data):
                break
            found.append(bytes(self._data[at + LENGTH_BYTES : end]))
            at = end
        del self._data[:at]
        return found


def decode(pickled: bytes) -> Message:
    """The message of one frame. Raises RefusedError. Short ones are remembered: a client says the same few things over and over."""
    return _decode_cached(pickled) if len(pickled) <= _CACHED_BYTES else _decode(pickled)


def _decode(pickled: bytes) -> Message:
    value = read_pickle(pickled)
    if type(value) is tuple and len(value) == 2:
        return _control(*value)
    if not isinstance(value, Named):
        raise RefusedError("a pickle that is no message")
    match value.name:
        case "AuthkeyMsg":
            return AuthkeyMsg()
        case "InitMsg":
            return _init(value.state)
        case "HeartbeatMsg":
            return HeartbeatMsg()
        case "SectionMsg":
            return _section(value.state)
        case "UpdateConfigMsg":
            return _update(value.state)
    raise RefusedError(f"a {value.name}, which is no message of its own")


_decode_cached = lru_cache(maxsize=128)(_decode)


def _init(state: dict[str, Any]) -> InitMsg:
    info = state.get("rank_info")
    about = info.state if isinstance(info, Named) and info.name == "RankInfo" else {}
    return InitMsg(
        rank=_int(about.get("global_rank")),
        pid=_int(about.get("pid")),
        reads_skip="num_warmup_iters" in state,
        warmup_iters=_int(state.get("num_warmup_iters")),
    )


def _section(state: dict[str, Any]) -> SectionMsg:
    action = SectionAction(_member(state.get("action"), "SectionAction", SectionAction))
    name = None if action is SectionAction.CLOSE_ALL else state.get("section")
    if name is None and action is not SectionAction.CLOSE_ALL:
        raise RefusedError("a section without a name")
    if name is not None and (type(name) is not str or not 0 < len(name) <= MAX_NAME_CHARS):
        raise RefusedError(f"a section whose name is no text of at most {MAX_NAME_CHARS} letters")
    iteration = state.get("iteration")
    return SectionMsg(name, action, iteration if type(iteration) is int and 0 <= iteration < 1 << 62 else None)


def _update(state: dict[str, Any]) -> UpdateConfigMsg:
    sections, beats = _part(state, "section_timeouts", "SectionTimeouts"), _part(state, "hb_timeouts", "HeartbeatTimeouts")
    named = sections.get("section", {})
    if type(named) is not dict or len(named) > _MAX_SECTIONS:
        raise RefusedError(f"section timeouts that are no dictionary of at most {_MAX_SECTIONS} sections")
    found = {name: seconds for name, value in named.items() if (seconds := _seconds(value)) is not None}
    return UpdateConfigMsg(MappingProxyType(found), _seconds(sections.get("out_of_section")), _seconds(beats.get("subsequent")))


def _part(state: dict[str, Any], key: str, name: str) -> dict[str, Any]:
    part = state.get(key)
    if part is None:
        return {}
    if not isinstance(part, Named) or part.name != name:
        raise RefusedError(f"{key} that are no {name}")
    return part.state


def _control(rank: object, request: object) -> WorkloadControlRequest:
    if not isinstance(request, Named) or request.name != "WorkloadControlRequest":
        raise RefusedError("a pair that is no workload control request")
    action = WorkloadAction(_member(request.state.get("action"), "WorkloadAction", WorkloadAction))
    said = request.state.get("description")
    return WorkloadControlRequest(_int(rank), action, printable(said[:MAX_WORDS]) if isinstance(said, str) else "")


def _member(value: object, name: str, enum: type[IntEnum]) -> int:
    """The number of an enum's member, which was pickled by its value or by its name."""
    if isinstance(value, Named) and value.name == name:
        for member in enum:
            if value.state.get("value") == member.value or value.state.get("member") == member.name:
                return member.value
    raise RefusedError(f"an action that is no {name}")


def _int(value: object) -> int | None:
    """Ranks travel as numbers, or as the text of RANK where no process group exists yet."""
    if type(value) is str and value.isascii() and value.isdigit() and len(value) < 10:
        return int(value)
    return value if type(value) is int and 0 <= value < 1 << 31 else None


def _seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 < value < 1e12 and math.isfinite(value) else None


def printable(text: str) -> str:
    """The text as it may stand in a log line and on a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


# -- what a client is answered ---------------------------------------------------------------------------------------------------------------------


def frame(pickled: bytes) -> bytes:
    """A pickle as it travels."""
    return len(pickled).to_bytes(LENGTH_BYTES, "big") + pickled


def error(cause: str) -> bytes:
    """The frame of an `ErrorMsg`."""
    return frame(b"\x80\x02" + _object((MODULE, "ErrorMsg"), {"cause": cause}) + b".")


def welcome(config: Mapping[str, Any]) -> bytes:
    """The frame of the `OkMsg` that answers an `InitMsg`, with a `FaultToleranceConfig` of these attributes (numbers, texts, None, dictionaries of these)."""
    return frame(b"\x80\x02" + _object((MODULE, "OkMsg"), {"cfg": _Raw(_object(_CONFIG, config))}) + b".")


@dataclass(frozen=True, slots=True)
class _Raw:
    """Opcodes that make a value."""

    code: bytes


def _object(cls: tuple[str, str], state: Mapping[str, Any]) -> bytes:
    """Opcodes: look the class up, make it without calling it, set its attributes."""
    return b"c" + "\n".join(cls).encode("ascii") + b"\n)\x81" + _value(state) + b"b"


def _value(value: object) -> bytes:
    if isinstance(value, _Raw):
        return value.code
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, int):
        return b"J" + struct.pack("<i", value)
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        data = value.encode("utf-8", "replace")
        return b"X" + struct.pack("<I", len(data)) + data
    if isinstance(value, Mapping):
        return b"}(" + b"".join(_value(k) + _value(v) for k, v in value.items()) + b"u"
    raise TypeError(f"no opcodes for {type(value).__name__}")


OK = frame(b"\x80\x02" + _object((MODULE, "OkMsg"), {}) + b".")
"""The frame of a plain `OkMsg`."""
REQUEST_OK = frame(b"\x80\x03C\x02ok.")
"""The frame that answers a workload control request: the bytes `ok`."""
