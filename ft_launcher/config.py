"""What this launch shall be: one frozen value that every other room is handed.

Built once by `ft_launcher.edge` from flags, file and environment, checked there, and never read again from anywhere. Nothing here parses,
and nothing here looks at the machine; a room that wants to know an option asks its `Config`, not `os.environ`. All times are in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ft_launcher.core.command import Command
from ft_launcher.core.topology import Topology

SECTIONS: Mapping[str, float] = {"setup": 600.0, "step": 180.0, "checkpointing": 420.0}
"""The sections that every job has, and how long each may take where nothing else is said, in seconds."""
OUT_OF_SECTION_S = 300.0


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Where the job's truth lives.

    `endpoints` is empty for `memory`. The password comes from FT_STORE_PASSWORD alone and is never shown.
    """

    kind: Literal["memory", "etcd"] = "memory"
    endpoints: tuple[tuple[str, int], ...] = ()
    timeout_s: float = 300.0
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long a section may stay open before its rank counts as hung: the fixed value, and the ceiling of a learned one."""

    sections: Mapping[str, float] = field(default_factory=lambda: dict(SECTIONS))
    out_of_section_s: float = OUT_OF_SECTION_S


@dataclass(frozen=True, slots=True)
class Tee:
    """Whose output is shown on the console: `ranks` None is all, empty is none. Every rank's output is in its log file anyway."""

    ranks: frozenset[int] | None = None

    def shows(self, rank: int) -> bool:
        """Whether this rank's lines go to the console."""
        return self.ranks is None or rank in self.ranks

    def __str__(self) -> str:
        if self.ranks is None:
            return "all"
        return ",".join(str(rank) for rank in sorted(self.ranks)) or "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One launch.

    `notes` are lines for the person who started it: what was said and is not used. `node_order` is the scheduler's number of this
    node (SLURM_NODEID); `nnodes_max` counts spares too, None where nobody said.
    """

    command: Command
    topology: Topology
    nnodes: int
    nproc: int
    run_id: str
    node_id: str
    log_dir: Path
    ft_state: Path
    nnodes_max: int | None = None
    node_addr: str | None = None
    node_labels: Mapping[str, str] = field(default_factory=dict)
    node_order: int | None = None
    store: StoreOptions = field(default_factory=StoreOptions)
    timeouts: Timeouts = field(default_factory=Timeouts)
    learn_timeouts: bool = True
    hang_action: Literal["restart", "log"] = "restart"
    max_restarts: int = 3
    no_progress_cycles: int = 3
    healthy_stretch_s: float = 21600.0
    quarantine_after: int = 3
    quarantine_days: float = 7.0
    progress_file: Path | None = None
    node_ttl_s: float = 10.0
    join_wait_s: float = 600.0
    spare_wait_s: float = 600.0
    exit_grace_s: float = 60.0
    term_grace_s: float = 25.0
    survivor_grace_s: float = 0.0
    forward_signals: tuple[int, ...] = ()
    health_check: str | None = None
    preload: tuple[str, ...] = ()
    start_method: Literal["fork", "spawn"] = "fork"
    tee: Tee = field(default_factory=Tee)
    origins: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    notes: tuple[str, ...] = field(default=(), repr=False, compare=False)

    def effective(self) -> dict[str, str]:
        """Option name -> its value as text and where that came from: `4 (flag)`, `2 (env SLURM_NNODES)`, `10 (default)`.

        Holds no secret.
        """
        return dict(self.origins)


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """`ft-launch simulate`: `nodes` None lets the simulated world choose; `faults` is that world's own notation; `hours` are simulated
    ones.
    """

    ranks: int = 128
    nodes: int | None = None
    hours: float = 24.0
    seed: int = 0
    faults: str | None = None
    json: bool = False
    story: bool = False


@dataclass(frozen=True, slots=True)
class SelftestOptions:
    """`ft-launch selftest`: `json` asks for one JSON object instead of the table."""

    json: bool = False


@dataclass(frozen=True, slots=True)
class DrainOptions:
    """`ft-launch drain NODE`: which node of which run shall hand over to a spare."""

    node: str
    run_id: str
    store: StoreOptions
