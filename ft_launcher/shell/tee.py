"""Turning the bytes of rank logs into lines for one console: whole lines, each with its rank, whatever a training script prints.

Pure: bytes in, bytes out, a little memory per rank for the line that is not finished. Knows what a terminal would show (a progress bar's
last state, not its thousand steps) and what would wreck it (control characters); must never know files or descriptors.
"""

from __future__ import annotations

from ft_launcher.errors import ConfigError

LINE_MAX_BYTES = 16_384
_KEPT_CONTROLS = (9, 27)  # tab, and escape for colours
_CLEAN = bytes(byte if byte >= 32 or byte in _KEPT_CONTROLS or byte in (10, 13) else ord("?") for byte in range(256)).replace(b"\x7f", b"?")


def parse_tee(value: str, world_size: int) -> frozenset[int]:
    """The ranks whose output is copied: `all`, `none`, or ranks separated by commas. Raises `ConfigError` for anything else and for ranks
    beyond the world.
    """
    word = value.strip().lower()
    if word in ("all", "none"):
        return frozenset(range(world_size) if word == "all" else ())
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts) or any(int(part) >= world_size for part in parts):
        raise ConfigError(f"--tee {value[:60]!a}: allowed are all, none, or ranks 0 to {world_size - 1} separated by commas, such as 0,3")
    return frozenset(int(part) for part in parts)


def prefix_for(rank: int, world_size: int) -> bytes:
    """`[r3] `, the rank padded with zeros to the width of the world's last rank."""
    return f"[r{rank:0{len(str(max(0, world_size - 1)))}d}] ".encode()


class Lines:
    """The output of one rank in one cycle, on its way to the console."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines completed by `data`, each prefixed and ended. A line longer than `LINE_MAX_BYTES` is split."""
        *whole, rest = (self._rest + data).split(b"\n")
        shown = [piece for line in whole for piece in self._pieces(line)]
        if len(rest) > LINE_MAX_BYTES:
            rest = _after_return(rest)
        cut = _cut_at(rest) if len(rest) > LINE_MAX_BYTES else 0
        while cut:
            shown.append(self._shown(rest[:cut]))
            rest = rest[cut:]
            cut = _cut_at(rest) if len(rest) > LINE_MAX_BYTES else 0
        self._rest = rest
        return shown

    def end(self) -> list[bytes]:
        """What was left without a line end when the rank was gone."""
        rest, self._rest = self._rest, b""
        return self._pieces(rest) if rest else []

    def _pieces(self, line: bytes) -> list[bytes]:
        line = _after_return(line)
        shown = []
        while len(line) > LINE_MAX_BYTES:
            cut = _cut_at(line)
            shown.append(self._shown(line[:cut]))
            line = line[cut:]
        return [*shown, self._shown(line)]

    def _shown(self, line: bytes) -> bytes:
        return self._prefix + _clean(line) + b"\n"


def _after_return(line: bytes) -> bytes:
    """What a terminal would still show of a line rewritten by carriage returns: the text after the last that is followed by anything."""
    return line.rstrip(b"\r").rsplit(b"\r", 1)[-1]


def _cut_at(line: bytes) -> int:
    """Where to cut a line too long: at the limit, but not inside a UTF-8 character."""
    cut = LINE_MAX_BYTES
    while cut > LINE_MAX_BYTES - 4 and line[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut


def _clean(line: bytes) -> bytes:
    clean = line.translate(_CLEAN)
    if clean.isascii():
        return clean
    return clean.decode("utf-8", "backslashreplace").encode("utf-8")
