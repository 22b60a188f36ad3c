"""Reads the pickles that NVRx's clients send, and nothing else: a reader of some forty opcodes that looks nothing up, imports nothing and calls nothing.

A pickle is a program, and `pickle.Unpickler` with a `find_class` of one's own closes only one of its doors: nine bytes (a memo index of 2**25) make it allocate half a
gigabyte, and a dictionary key of some hundred thousand nested tuples overflows the C stack and takes the process along. The agent must outlive both, so it runs no
foreign program at all. Here a class is a name out of `CLASSES`, an object is that name with a dictionary of plain values, and whatever is not needed for these (every other
opcode, every other name, a key that is no text) is refused. Steps and bytes are bounded, so a frame costs a bounded time.

Knows the pickle format (protocols 4 and 5, `pickletools` of the standard library describes it) and the names of `nvidia_resiliency_ext.fault_tolerance.data`; what the
messages mean is `nvrx_wire`'s.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MODULE = "nvidia_resiliency_ext.fault_tolerance.data"
ENUMS = frozenset({"SectionAction", "WorkloadAction"})
CLASSES = ENUMS | {
    "AuthkeyMsg", "HeartbeatMsg", "HeartbeatTimeouts", "InitMsg", "RankInfo", "SectionMsg", "SectionTimeouts", "UpdateConfigMsg", "WorkloadControlRequest",
}  # fmt: skip
MAX_STEPS = 8192
"""An `UpdateConfigMsg` with 64 sections takes about 600."""
MAX_NAME_CHARS = 200

_INT = struct.Struct("<i")
_UINT = struct.Struct("<I")
_FLOAT = struct.Struct(">d")


class RefusedError(Exception):
    """The bytes are not a message of this protocol; the text says why, fit for a log line."""


@dataclass(slots=True)
class Named:
    """An object of one of `CLASSES` with its attributes; of an enum's member `value` or `member` is known."""

    name: str
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Class:
    name: str


class _Getattr:
    """What `builtins.getattr` stands for: some Python versions pickle an enum's member as `getattr(<enum>, "<member>")`."""


_GETATTR = _Getattr()


def read_pickle(data: bytes) -> object:
    """The value that the pickle makes: plain values and `Named`. Raises RefusedError for anything that is not within the subset."""
    reader = _Reader(data)
    try:
        return reader.run()
    except (IndexError, struct.error, UnicodeDecodeError, TypeError, KeyError) as error:
        raise RefusedError(f"a broken pickle ({type(error).__name__} at byte {reader.at})") from None


class _Reader:
    """The machine: a stack, the stacks below the open marks, and a memo."""

    __slots__ = ("at", "below", "data", "memo", "stack")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: list[Any] = []

    def run(self) -> object:
        """Steps until STOP."""
        for _ in range(MAX_STEPS):
            code = self.data[self.at]
            self.at += 1
            if code == _STOP:
                return self._end()
            step = _STEPS.get(code)
            if step is None:
                raise RefusedError(f"a pickle with opcode {code:#04x}, which no message of this protocol has")
            step(self)
        raise RefusedError(f"a pickle of more than {MAX_STEPS} steps")

    def _end(self) -> object:
        if self.at != len(self.data) or len(self.stack) != 1 or self.below:
            raise RefusedError("a pickle that does not end where its frame does")
        return self.stack[0]

    # -- bytes ------------------------------------------------------------------------------------------------------------------------------

    def take(self, size: int) -> bytes:
        """The next bytes."""
        end = self.at + size
        if end > len(self.data):
            raise RefusedError("a pickle that is cut short")
        part, self.at = self.data[self.at : end], end
        return part

    def byte(self) -> int:
        """The next byte."""
        return self.take(1)[0]

    def uint(self) -> int:
        """The next four, little-endian."""
        return int(_UINT.unpack(self.take(4))[0])

    # -- the stack --------------------------------------------------------------------------------------------------------------------------

    def mark(self) -> None:
        """What follows belongs together."""
        self.below.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        """What followed the last mark, which is gone with it."""
        items, self.stack = self.stack, self.below.pop()
        return items

    def memoize(self) -> None:
        """Remember the top under the next number; a number of the sender's choice cannot be had."""
        self.memo.append(self.stack[-1])

    def get(self, index: int) -> None:
        """Recall."""
        self.stack.append(self.memo[index])

    def pack(self, count: int) -> None:
        """The topmost values become a tuple."""
        if count > len(self.stack):
            raise IndexError
        self.stack[len(self.stack) - count :] = [tuple(self.stack[len(self.stack) - count :])]

    def pack_marked(self) -> None:
        """What followed the last mark becomes a tuple."""
        items = self.since_mark()
        self.stack.append(tuple(items))

    # -- names and objects -------------------------------------------------------------------------------------------------------------------

    def find(self, module: object, name: object) -> None:
        """The only names that mean anything."""
        if module == MODULE and isinstance(name, str) and name in CLASSES:
            self.stack.append(_Class(name))
        elif module == "builtins" and name == "getattr":
            self.stack.append(_GETATTR)
        else:
            raise RefusedError(f"a pickle that asks for {_shown(module)}.{_shown(name)}, which is not allowed")

    def stack_global(self) -> None:
        """Module and name are on the stack."""
        name, module = self.stack.pop(), self.stack.pop()
        self.find(module, name)

    def new(self) -> None:
        """An empty object of a class."""
        args, cls = self.stack.pop(), self.stack.pop()
        if not isinstance(cls, _Class) or args != ():
            raise RefusedError("a pickle that makes something other than a message")
        self.stack.append(Named(cls.name))

    def reduce(self) -> None:
        """Only an enum's member is made by a call."""
        args, called = self.stack.pop(), self.stack.pop()
        if isinstance(called, _Class) and called.name in ENUMS and _types(args) == (int,):
            self.stack.append(Named(called.name, {"value": args[0]}))
        elif called is _GETATTR and _types(args) == (_Class, str) and args[0].name in ENUMS:
            self.stack.append(Named(args[0].name, {"member": args[1]}))
        else:
            raise RefusedError("a pickle that calls something")

    def build(self) -> None:
        """An object gets its attributes."""
        state = self.stack.pop()
        target = self.stack[-1]
        if type(state) is not dict or not isinstance(target, Named):
            raise RefusedError("a pickle that sets the state of something other than a message")
        target.state = state

    # -- containers ---------------------------------------------------------------------------------------------------------------------------

    def set_items(self, items: list[Any]) -> None:
        """Into the dictionary on top; keys are short texts, for hashing anything else may never end."""
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise RefusedError("a pickle with items for something that is no dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_text(key)] = value

    def add_items(self, items: list[Any]) -> None:
        """Into the set on top."""
        target = self.stack[-1]
        if type(target) is not set:
            raise RefusedError("a pickle with members for something that is no set")
        target.update(_text(item) for item in items)

    def append_items(self, items: list[Any]) -> None:
        """To the list on top."""
        target = self.stack[-1]
        if type(target) is not list:
            raise RefusedError("a pickle that appends to something that is no list")
        target.extend(items)

    def set_item(self) -> None:
        """One key and value."""
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])


def _text(value: object) -> str:
    if type(value) is not str or len(value) > MAX_NAME_CHARS:
        raise RefusedError("a pickle with a key that is no short text")
    return value


def _types(args: object) -> tuple[type, ...]:
    return tuple(type(arg) for arg in args) if type(args) is tuple else ()


def _shown(value: object) -> str:
    return ascii(value[:60])[1:-1] if isinstance(value, str) else "something"


def _proto(reader: _Reader) -> None:
    if reader.byte() not in (4, 5):
        raise RefusedError("a pickle of an unknown protocol")


def _push(make: Callable[[_Reader], Any]) -> Callable[[_Reader], None]:
    def step(reader: _Reader) -> None:
        reader.stack.append(make(reader))

    return step


_STOP = ord(".")
_STEPS: dict[int, Callable[[_Reader], Any]] = {
    0x80: _proto,
    0x95: lambda r: r.take(8),  # FRAME: a length that nothing here needs
    ord("("): _Reader.mark,
    ord("N"): _push(lambda r: None),
    0x88: _push(lambda r: True),
    0x89: _push(lambda r: False),
    ord("J"): _push(lambda r: _INT.unpack(r.take(4))[0]),
    ord("K"): _push(_Reader.byte),
    ord("M"): _push(lambda r: int.from_bytes(r.take(2), "little")),
    0x8A: _push(lambda r: int.from_bytes(r.take(r.byte()), "little", signed=True)),
    ord("G"): _push(lambda r: _FLOAT.unpack(r.take(8))[0]),
    0x8C: _push(lambda r: r.take(r.byte()).decode()),
    ord("X"): _push(lambda r: r.take(r.uint()).decode()),
    ord("C"): _push(lambda r: r.take(r.byte())),
    ord("B"): _push(lambda r: r.take(r.uint())),
    0x94: _Reader.memoize,
    ord("h"): lambda r: r.get(r.byte()),
    ord("j"): lambda r: r.get(r.uint()),
    ord(")"): _push(lambda r: ()),
    ord("t"): _Reader.pack_marked,
    0x85: lambda r: r.pack(1),
    0x86: lambda r: r.pack(2),
    0x87: lambda r: r.pack(3),
    ord("}"): _push(lambda r: {}),
    ord("s"): _Reader.set_item,
    ord("u"): lambda r: r.set_items(r.since_mark()),
    ord("]"): _push(lambda r: []),
    ord("a"): lambda r: r.append_items([r.stack.pop()]),
    ord("e"): lambda r: r.append_items(r.since_mark()),
    0x8F: _push(lambda r: set()),
    0x90: lambda r: r.add_items(r.since_mark()),
    0x93: _Reader.stack_global,
    0x81: _Reader.new,
    ord("R"): _Reader.reduce,
    ord("b"): _Reader.build,
}
"""Opcode -> what it does (the letters are the format's own)."""
