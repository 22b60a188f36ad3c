"""One text to one value: the readers of everything that a person can write behind an option.

A reader takes the text alone and returns the value or raises `BadValueError` with what is allowed. It does not know whether the text came
from a flag, a file or the environment: `sources.Reader` adds that, so that every complaint names key, value, allowed range and place in
the same way. No reader touches the machine, the clock or the environment.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Callable
from difflib import get_close_matches

from ft_launcher.config import SECTIONS, StoreOptions, Tee

MOST = 10**7
"""Largest count that any option takes: beyond it the text is a slip of the finger, not a job."""
LONGEST_S = 10.0**9
"""Longest time that any option takes, about 30 years, in seconds: later arithmetic on clocks stays exact."""

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_LABEL_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?\.?")
_SECTION = re.compile(r"[A-Za-z_][A-Za-z0-9_.:/-]*")
_YES = {"1", "true", "yes", "on"}
_NO = {"0", "false", "no", "off"}
_NOT_FORWARDED = {
    "KILL": "cannot be caught",
    "STOP": "cannot be caught",
    "TERM": "is always handled (drain)",
    "INT": "is always handled (drain)",
}
_OURS = {"CHLD", "SEGV", "BUS", "FPE", "ILL", "ABRT", "TRAP", "SYS"}


class BadValueError(ValueError):
    """The text is not a value of this option; the message says what is allowed."""


def show(text: str, limit: int = 80) -> str:
    """The text as an error line quotes it: escapes for what is not printable, cut where it is long, no user or password of a URL."""
    if "://" in text and "@" in text:
        text = text.partition("://")[0] + "://***"
    quoted = repr(text if len(text) <= limit else text[: limit - 3] + "...")
    return quoted.encode("ascii", "backslashreplace").decode() if not quoted.isprintable() else quoted


def nearest(word: str, known: object) -> str:
    """`; did you mean X?` for the known word nearest to this one, or nothing."""
    names = [str(name) for name in known] if isinstance(known, (list, tuple, set, frozenset, dict)) else []
    close = get_close_matches(word, names, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def count(at_least: int = 1) -> Callable[[str], int]:
    """Reader of a whole number >= `at_least`, in plain digits."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,18}", text, re.ASCII) or not at_least <= int(text) <= MOST:
            raise BadValueError(f"must be a whole number from {at_least} to {MOST}")
        return int(text)

    return read


def seconds(at_least: float | None = None) -> Callable[[str], float]:
    """Reader of a time in seconds: > 0, or >= `at_least` where that is given; never NaN or infinite."""
    allowed = "more than 0" if at_least is None else f"at least {at_least:g}"

    def read(text: str) -> float:
        value = _number(text)
        low = value <= 0 if at_least is None else value < at_least
        if not math.isfinite(value) or low or value > LONGEST_S:
            raise BadValueError(f"must be a number of seconds, {allowed} and at most {LONGEST_S:g}")
        return value

    return read


def hours(text: str) -> float:
    """Simulated hours: > 0, a year at most."""
    value = _number(text)
    if not 0 < value <= 8784:
        raise BadValueError("must be a number of hours, more than 0 and at most 8784 (a year)")
    return value


def days(text: str) -> float:
    """A time in days: > 0, ten years at most."""
    value = _number(text)
    if not 0 < value <= 3650:
        raise BadValueError("must be a number of days, more than 0 and at most 3650")
    return value


def _number(text: str) -> float:
    """The number, NaN where the text is none. Python's own extras (`1_000`, other scripts' digits, blanks) are not numbers here."""
    return float(text) if re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?", text, re.ASCII) else math.nan


def choice(*words: str) -> Callable[[str], str]:
    """Reader of one of `words`."""

    def read(text: str) -> str:
        if text not in words:
            raise BadValueError(f"must be one of {', '.join(words)}{nearest(text, words)}")
        return text

    return read


def boolean(text: str) -> bool:
    """true/false, yes/no, on/off, 1/0."""
    if text.lower() not in _YES | _NO:
        raise BadValueError("must be true or false")
    return text.lower() in _YES


def is_identifier(text: str) -> bool:
    """Whether `identifier` would take it."""
    return bool(_ID.fullmatch(text)) and len(text) <= 200


def identifier(text: str) -> str:
    """A run id or node id: it becomes part of file names and of the store's keys."""
    if not is_identifier(text):
        raise BadValueError(
            "must be 1 to 200 letters, digits, '.', '_' or '-', the first a letter or digit (it becomes part of file names)"
        )
    return text


def nonempty(text: str) -> str:
    """Any text with something in it and no NUL."""
    if not text.strip() or "\0" in text:
        raise BadValueError("must not be empty")
    return text


def node_range(text: str) -> tuple[int, int | None]:
    """`N` or `N:MAX`: nodes that compute, and how many there may be with the spares."""
    low, colon, high = text.partition(":")
    least = count()(low)
    most = count()(high) if colon else None
    if most is not None and most < least:
        raise BadValueError(f"N:MAX needs MAX >= N: {least} nodes compute, the rest of MAX are spares")
    return least, most


def endpoint(text: str) -> tuple[str, int]:
    """`host:port` or `[v6 address]:port`."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^:\[\]]+)):([0-9]{1,5})", text, re.ASCII)
    if not match or (match[2] and not _HOST.fullmatch(match[2])) or not 1 <= int(match[3]) <= 65535:
        raise BadValueError("must be host:port with a port from 1 to 65535 (an IPv6 address in brackets)")
    return match[1] or match[2], int(match[3])


def address(text: str) -> str:
    """A host name or IP address, with `:port` where the channel's port must be a fixed one."""
    bare = re.fullmatch(r"[0-9A-Fa-f:.%]*:[0-9A-Fa-f:.%]*:[0-9A-Fa-f:.%]*", text) or _HOST.fullmatch(text)
    if not bare:
        try:
            endpoint(text)
        except BadValueError:
            raise BadValueError(
                "must be a host name or address of this node, or host:port with a port from 1 to 65535 (an IPv6 address in brackets)"
            ) from None
    return text


def store(text: str) -> StoreOptions:
    """`memory` or `etcd://host:port[,host:port]`. Never repeats a password that somebody wrote into the URL."""
    if text == "memory":
        return StoreOptions()
    scheme, _, rest = text.partition("://")
    if scheme != "etcd" or not rest:
        raise BadValueError(f"must be memory or etcd://host:port[,host:port]{nearest(scheme, ['memory', 'etcd'])}")
    if "@" in rest:
        raise BadValueError("must not hold a user or a password: give --store-user U and put the password in FT_STORE_PASSWORD")
    found: dict[tuple[str, int], None] = {}
    for part in rest.split(","):
        try:
            found[endpoint(part)] = None
        except BadValueError as bad:
            raise BadValueError(f"must be memory or etcd://host:port[,host:port]: {show(part)} {bad}") from None
    return StoreOptions(kind="etcd", endpoints=tuple(found))


def timeouts(text: str) -> dict[str, float]:
    """`setup=600,step=180,+mine=30` to {"setup": 600.0, "step": 180.0, "mine": 30.0}, in seconds.

    A section that the script names itself is written with a plus: without it a slip (`stpe=900`) would silently leave the intended
    timeout as it was.
    """
    found: dict[str, float] = {}
    for part in _parts(text):
        name, equals, value = part.partition("=")
        if not equals:
            raise BadValueError(f"{show(part)} must be SECTION=SECONDS, as in setup=600,step=180")
        own = name.removeprefix("+")
        if not _SECTION.fullmatch(own) or (own == name and own not in SECTIONS):
            hint = nearest(name, SECTIONS) or f"; a section that your script names itself is written +{own}={value}"
            raise BadValueError(f"unknown section {show(name)}, must be one of {', '.join(SECTIONS)}{hint}")
        if own in found:
            raise BadValueError(f"section {own} is given twice")
        try:
            found[own] = seconds()(value)
        except BadValueError as bad:
            raise BadValueError(f"timeout of {own}, {show(value)}, {bad}") from None
    return found


def labels(text: str) -> dict[str, str]:
    """`K=V[,K=V]` to a mapping."""
    found: dict[str, str] = {}
    for part in _parts(text):
        key, equals, value = part.partition("=")
        if not equals or not _LABEL_KEY.fullmatch(key) or not value or not value.isprintable() or len(part) > 250:
            raise BadValueError(
                f"{show(part)} must be KEY=VALUE (key: letters, digits, '.', '_', '/', '-'; value: not empty), as in rack=r12"
            )
        if key in found:
            raise BadValueError(f"label {key} is given twice")
        found[key] = value
    return found


def signals(text: str) -> tuple[int, ...]:
    """`USR1,USR2` (`SIGUSR1` and numbers too) to signal numbers; `none` to ()."""
    return () if text == "none" else tuple(dict.fromkeys(_signal(part) for part in _parts(text)))


def _signal(text: str) -> int:
    name = text.upper().removeprefix("SIG")
    try:
        number = signal.Signals(int(name)) if re.fullmatch(r"[0-9]{1,3}", name, re.ASCII) else signal.Signals["SIG" + name]
    except (KeyError, ValueError):
        known = [sig.name.removeprefix("SIG") for sig in signal.Signals]
        raise BadValueError(f"{show(text)} is no signal (as in USR1,USR2 or none){nearest(name, known)}") from None
    name = number.name.removeprefix("SIG")
    if name in _NOT_FORWARDED or name in _OURS:
        raise BadValueError(
            f"{name} {_NOT_FORWARDED.get(name, 'has a meaning of its own')} and cannot be forwarded; as in USR1,USR2 or none"
        )
    return int(number)


def tee(text: str) -> Tee:
    """`all`, `none`, or ranks: `0,3`."""
    if text in ("all", "none"):
        return Tee(None if text == "all" else frozenset())
    try:
        return Tee(frozenset(count(0)(part) for part in _parts(text)))
    except BadValueError:
        raise BadValueError("must be all, none, or ranks as in 0,3") from None


def modules(text: str) -> tuple[str, ...]:
    """`torch,megatron.core` to module names; `none` to ()."""
    names = () if text == "none" else _parts(text)
    for name in names:
        if not all(word.isidentifier() for word in name.split(".")):
            raise BadValueError(f"{show(name)} is no module name (as in torch,megatron.core or none)")
    return tuple(dict.fromkeys(names))


def _parts(text: str) -> tuple[str, ...]:
    """The parts between commas; an empty one is a mistake, not a nothing."""
    parts = tuple(part.strip() for part in text.split(","))
    if not all(parts):
        raise BadValueError("must not have an empty part" if len(parts) > 1 else "must not be empty")
    return parts
