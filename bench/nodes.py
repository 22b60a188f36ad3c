"""Several nodes: a rank crashes, an agent is killed, a host falls silent, the controller is lost. Beside torchrun and NVRx where they can do it.

    python bench/nodes.py [--runs 5] [--quick] [--json FILE] [--contestants ft-launch]

Two agents of two ranks each train (`scripts/steps.py`, gloo, 20 ms steps), a third waits: all on this machine over loopback, ft-launch over a real etcd with its default settings.
"Killed" is SIGKILL of the agent's process alone, the host lives; "silent" is SIGSTOP of the agent and everything below it. The clock starts just before the signal and stops at
what the slowest new rank has stamped, or when the new controller's first write of the job state is visible. The others have neither spare controllers nor a TTL to choose; they
get two turns, at their defaults, whose second half is what they may not survive: a fault without a new step within a minute is told in a note.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from _common.contestants import FT, LAUNCHERS, NVRX, TORCHRUN
from _common.figures import Figure, Options, Results, parse, progress, run
from _common.fleet import Fleet
from _common.processes import BenchError

RECOVERY_LIMIT_S = 60.0
OTHERS_TURNS = 2
SHORT_TTL_S, LONG_TTL_S = 3.0, 10.0
FORKED_LIMIT_S, SPARE_LIMIT_S, DECIDING_LIMIT_S = 0.2, 3.0, 2.0
PLAIN, RANK0, CONTROLLER = "plain node", "rank 0's node", "controller's node"
CRASH, FORKED = "crash on one of 2 nodes -> new step on all", "crash on one of 2 nodes -> first line on all"
BESIDE = "crash beside a waiting agent -> new step"
KILLED, SILENT, STEPPED = "agent killed", "silent", "-> first step"
DECIDING = "-> next decides"
TOUCHED = "others' ranks touched by that"
"""What is left of a figure's name must tell it apart: tables have 52 characters."""


@dataclass(slots=True)
class Found:
    """Figure -> its values, seconds unless the name says otherwise; sentences on what a contestant cannot do."""

    values: dict[str, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, value: float) -> None:
        """One more value."""
        self.values.setdefault(name, []).append(value)
        progress(f"   {name}: {value:.3f}")


Scene = Callable[[Fleet, Found], None]


def recover(fleet: Fleet, fault: Callable[[], int]) -> tuple[float, float]:
    """Seconds from the fault until all ranks of the next attempt have reached their first line, and their first step. Raises BenchError."""
    known = frozenset(moment.pid for moments in fleet.stamps.read().values() for moment in moments)
    fault_ns = fault()
    fleet.wait_for(lambda: fleet.stamps.first_on_all("step", fault_ns, known) is not None, "new step of all ranks", RECOVERY_LIMIT_S)
    line_ns, step_ns = (fleet.stamps.first_on_all(kind, fault_ns, known) for kind in ("line", "step"))
    assert line_ns is not None and step_ns is not None
    return (line_ns - fault_ns) / 1e9, (step_ns - fault_ns) / 1e9


# -- faults ----------------------------------------------------------------------------------------------------------------------------------------


def crash(fleet: Fleet, found: Found, victim: int, name: str = CRASH) -> None:
    """A rank of one node is killed; the node is well."""
    fleet.settle()
    line_s, step_s = recover(fleet, lambda: fleet.kill_rank(victim))
    if name == CRASH:
        found.add(f"{fleet.contestant}: {FORKED}", line_s)
    found.add(f"{fleet.contestant}: {name}", step_s)


def lose(fleet: Fleet, found: Found, role: str, silent: bool = False) -> None:
    """The node in this role is killed, or falls silent; then there is a new spare."""
    fleet.settle()
    victim = in_role(fleet, role)
    try:
        _, step_s = recover(fleet, lambda: fleet.freeze(victim) if silent else fleet.kill_agent(victim))
    finally:
        fleet.remove(victim)
    found.add(name_of(fleet, role, silent), step_s)
    fleet.start_spare()


def name_of(fleet: Fleet, role: str, silent: bool) -> str:
    """What the figure is called."""
    ttl = f" TTL {fleet.ttl_s:g}" if silent and fleet.contestant == FT else ""
    return f"{fleet.contestant}: {role}, {SILENT if silent else KILLED}{ttl} {STEPPED}"


def in_role(fleet: Fleet, role: str) -> str:
    """The node with this role and, of the other two, as few as can be. For the others the "controller" is the agent that holds the rendezvous: the first."""
    first, second = fleet.holders()
    controller = fleet.controller() if fleet.contestant == FT else "n0"
    if role == CONTROLLER:
        return controller
    if role == RANK0:
        if controller == first:
            raise BenchError("the controller is on the node of rank 0: no node has this role alone")
        return first
    return second if controller != second else first


def lose_controller(fleet: Fleet, found: Found, silent: bool) -> None:
    """The controller is on a spare and dies, or falls silent: the others' ranks train on."""
    fleet.settle()
    victim = fleet.hand_over()
    fleet.settle()
    pids = fleet.stamps.pids()
    fault_ns = fleet.freeze(victim) if silent else fleet.kill_agent(victim)
    fleet.wait_for(lambda: fleet.deciding_since(fault_ns, but=victim) is not None, "new controller", RECOVERY_LIMIT_S)
    deciding_ns = fleet.deciding_since(fault_ns, but=victim)
    assert deciding_ns is not None
    how = f"silent, TTL {fleet.ttl_s:g}" if silent else "killed"
    found.add(f"{FT}: controller {how} {DECIDING}", (deciding_ns - fault_ns) / 1e9)
    fleet.remove(victim)
    fleet.start_spare()
    fleet.settle()
    found.add(f"{FT}: {TOUCHED}", float(sum(fleet.stamps.pids()[rank] != pid for rank, pid in pids.items())))


# -- jobs --------------------------------------------------------------------------------------------------------------------------------------------


def form(fleet: Fleet, first: str) -> None:
    """Two nodes. Who starts first decides (ft-launch), or keeps the rendezvous (the others); the name decides who has rank 0 (ft-launch)."""
    fleet.start(first)
    if fleet.contestant == FT:
        fleet.controller()
    else:
        fleet.wait_listening()
    fleet.start("n1" if first == "n0" else "n0")
    fleet.settle()


def crashes_and_kills(fleet: Fleet, found: Found, turn: int) -> None:
    """The controller is on the node of rank 0 in even turns, on the other one in odd ones: so each role is met alone."""
    form(fleet, "n0" if turn % 2 == 0 else "n1")
    fleet.start_spare()
    crash(fleet, found, turn % fleet.stamps.world)
    lose(fleet, found, PLAIN if turn % 2 == 0 else RANK0)
    crash(fleet, found, (turn + 1) % fleet.stamps.world)
    for _ in range(2):
        lose(fleet, found, PLAIN if turn % 2 == 0 else RANK0)
    lose(fleet, found, CONTROLLER)


def look(fleet: Fleet, found: Found, turn: int) -> None:
    """One of each kind, the quick ones: to see that it works."""
    form(fleet, "n0")
    fleet.start_spare()
    crash(fleet, found, 1)
    lose(fleet, found, PLAIN)
    lose_controller(fleet, found, silent=False)


def silences(fleet: Fleet, found: Found, turn: int) -> None:
    """Hosts that fall silent: a plain one, the controller's, and a controller on a spare."""
    form(fleet, "n0")
    fleet.start_spare()
    lose_controller(fleet, found, silent=False)
    lose(fleet, found, PLAIN, silent=True)
    lose_controller(fleet, found, silent=True)
    if fleet.ttl_s == SHORT_TTL_S:
        lose(fleet, found, CONTROLLER, silent=True)


def others(fleet: Fleet, found: Found, turn: int) -> None:
    """What torchrun and NVRx can be asked: a crash of two nodes alone, a killed node with a third agent waiting; then what they may not survive, in each turn something else."""
    form(fleet, "n0")
    crash(fleet, found, turn % fleet.stamps.world)
    fleet.start_spare()
    if not attempt(fleet, found, name_of(fleet, PLAIN, silent=False), lambda: lose(fleet, found, PLAIN)):
        return
    if turn % 2 == 0:
        attempt(fleet, found, name_of(fleet, CONTROLLER, silent=False), lambda: lose(fleet, found, CONTROLLER))
    elif attempt(fleet, found, name_of(fleet, PLAIN, silent=True), lambda: lose(fleet, found, PLAIN, silent=True)):
        attempt(fleet, found, f"{fleet.contestant}: {BESIDE}", lambda: crash(fleet, found, 1, BESIDE))


def attempt(fleet: Fleet, found: Found, name: str, scene: Callable[[], None]) -> bool:
    """A fault that this contestant may not survive: then that is what is said, and False."""
    try:
        scene()
    except BenchError as error:
        progress(str(error))
        found.notes.append(f"{name}: {str(error).splitlines()[0]}")
        return False
    return True


@dataclass(frozen=True, slots=True)
class Turn:
    """One job."""

    contestant: str
    scene: Callable[[Fleet, Found, int], None]
    number: int
    ttl_s: float = LONG_TTL_S


def turns(options: Options) -> Iterator[Turn]:
    """In turn, so that a slow moment of the machine does not fall on one contestant alone. Two jobs give each of ours at least one value of every kind."""
    for number, name in product(range(options.runs), options.contestants):
        if name != FT:
            if number < OTHERS_TURNS:
                yield Turn(name, others, number)
            continue
        if options.quick:
            yield Turn(FT, look, number)
            continue
        yield Turn(FT, crashes_and_kills, number)
        yield Turn(FT, silences, number, SHORT_TTL_S)
        if number % 2 == 0:
            yield Turn(FT, silences, number, LONG_TTL_S)


def measure(options: Options, folder: Path) -> Results:
    """All turns, then the table."""
    found = Found()
    for place, turn in enumerate(turns(options)):
        progress(f"turn {turn.number + 1}: {turn.contestant}, {turn.scene.__name__}")
        with Fleet(turn.contestant, folder / f"{place}", turn.ttl_s) as fleet:
            try:
                turn.scene(fleet, found, turn.number)
            except BenchError as error:
                progress(str(error))
                found.notes.append(f"{turn.contestant}, {turn.scene.__name__}, turn {turn.number + 1}: {str(error).splitlines()[0]}")
    results = Results("nodes", notes=found.notes)
    figures = {name: results.add(name, "" if TOUCHED in name else "s", values) for name, values in sorted(found.values.items())}
    judge(results, figures)
    return results


def judge(results: Results, figures: dict[str, Figure | None]) -> None:
    """Ours against what was promised, and beside the others."""
    results.check(f"{FT}: {FORKED}", figures.get(f"{FT}: {FORKED}"), FORKED_LIMIT_S)
    for name, figure in figures.items():
        if name.startswith(FT) and name.endswith(STEPPED):
            results.check(name, figure, ttl_in(name) + SPARE_LIMIT_S)
        elif name.endswith(DECIDING):
            results.check(name, figure, ttl_in(name) + DECIDING_LIMIT_S)
        elif name.endswith(TOUCHED) and figure is not None:
            results.check(f"{name}, most", Figure(name, "", (max(figure.values),)), 0.0)
    for other in (TORCHRUN, NVRX):
        for what in (CRASH, f"{PLAIN}, {KILLED} {STEPPED}"):
            ours, theirs = figures.get(f"{FT}: {what}"), figures.get(f"{other}: {what}")
            if ours is not None and theirs is not None:
                results.notes.append(f"{what}: ft-launch / {other} = {ours.median / theirs.median:.3g}")


def ttl_in(name: str) -> float:
    """The TTL that a figure's name tells, seconds; 0 where it plays no part."""
    return float(name.partition("TTL ")[2].split(" ")[0]) if "TTL " in name else 0.0


if __name__ == "__main__":
    sys.exit(run(parse(__doc__, LAUNCHERS), measure))
