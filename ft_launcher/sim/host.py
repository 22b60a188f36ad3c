"""A machine of the fake cluster: what outlives an agent, how it is cut off, and what is about to go wrong with it.

The next zygote, reaping, kill or standby store asks here whether it meets bad luck; each misfortune strikes once. It knows nothing of jobs.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Luck:
    """Misfortunes in waiting, each consumed by what it strikes; seconds, 0 for none."""

    zygote_slow_s: float = 0.0
    zygote_fails: int = 0
    reap_slow_s: float = 0.0
    leaves_unkillable: bool = False
    kill_slow_s: float = 0.0
    standby_slow_s: float = 0.0
    standby_fails: bool = False
    late_s: float = 0.0
    finish_late_s: float = 0.0
    finish_trains: bool = False

    def take(self, name: str) -> float:
        """The seconds of a misfortune, which is thereby used up."""
        value = float(getattr(self, name))
        setattr(self, name, type(getattr(self, name))(0))
        return value


@dataclass(slots=True)
class Host:
    """One machine. `clock_ns`: its CLOCK_MONOTONIC differs from everybody's by this. `up`: an agent may run here. `silent`: the machine itself is gone.

    Until `store_cut_until` the store is out of its reach, until `isolated_until` everything is, and until `lossy_until` its channel loses, repeats and delays messages by up to `lossy_s`.
    `frozen_until`: all of its processes stand still until then. `bad`: slots whose device computes wrong numbers, and after how many seconds on average that is noticed;
    `exchanged`: how often its hardware was; `uuids`: its devices have names of their own.
    """

    name: str
    number: int
    clock_ns: int
    up: bool = True
    silent: bool = False
    store_slow_s: float = 0.0
    store_slow_until: float = 0.0
    store_cut_until: float = 0.0
    isolated_until: float = 0.0
    lossy_until: float = 0.0
    lossy_s: float = 0.0
    frozen_until: float = 0.0
    luck: Luck = field(default_factory=Luck)
    boots: int = 0
    bad: dict[int, float] = field(default_factory=dict)
    exchanged: int = 0
    uuids: bool = False

    def devices(self, nproc: int) -> tuple[str, ...]:
        """The stable names of its devices by slot; none where it knows none."""
        return tuple(f"GPU-{self.number:x}-{self.exchanged}-{slot}" for slot in range(nproc)) if self.uuids else ()

    def exchange(self) -> None:
        """Its hardware is replaced by other, which works."""
        self.bad.clear()
        self.exchanged += 1
