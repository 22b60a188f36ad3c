"""The notation of `--faults`: `crash=0.5,hang=0.1,spares=2`, and what a user can get wrong in it.

It knows words and numbers; the kinds of fault and what they mean are in `faults`.
"""

from __future__ import annotations

from math import isfinite

from ft_launcher.errors import ConfigError
from ft_launcher.sim.faults import KINDS, Mix

AFTERSHOCK = "aftershock"
"""Share of faults that a further one follows, from a millisecond to half a minute later: in the middle of the restart."""
SPARES = "spares"
RESTARTS = "max-restarts"
KNOBS = {AFTERSHOCK: 1.0, SPARES: 100_000.0, RESTARTS: 1_000_000_000.0}


def parse(text: str | None) -> Mix:
    """`crash=0.5,hang=0.1,node=0.05`, `none`, or None and `swarm` for a mix drawn from the seed. ConfigError, one line, for anything else."""
    if text is None or text.strip() == "swarm":
        return Mix(swarm=True)
    if text.strip() == "none":
        return Mix()
    found: dict[str, float] = {}
    for word in text.split(","):
        name, equals, value = (part.strip() for part in word.partition("="))
        if name not in KINDS and name not in KNOBS:
            raise ConfigError(f"--faults: unknown word {name!r}; known are {', '.join((*KINDS, *KNOBS))}, none and swarm")
        if name in found:
            raise ConfigError(f"--faults: {name} is given twice")
        found[name] = _number(name, value if equals else "")
    rates = {name: value for name, value in found.items() if name in KINDS}
    spares, restarts = found.get(SPARES), found.get(RESTARTS)
    return Mix(rates, found.get(AFTERSHOCK, 0.0), None if spares is None else int(spares), None if restarts is None else int(restarts))


def _number(name: str, text: str) -> float:
    ceiling = KNOBS.get(name, 10_000.0)
    unit = "" if name in KNOBS else " (faults per 1,000 node-hours)"
    allowed = (
        f"must be a number from 0 to {ceiling:g}{unit}, as in {name}=0.5"
        if name in (*KINDS, AFTERSHOCK)
        else f"must be a whole number, as in {name}=4"
    )
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"--faults: {name}={text!r} {allowed}") from None
    if not isfinite(value) or not 0 <= value <= ceiling or (name in (SPARES, RESTARTS) and value != int(value)):
        raise ConfigError(f"--faults: {name}={text} {allowed}")
    return value
