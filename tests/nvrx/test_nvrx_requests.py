"""What becomes of a rank's requests: once each, and a node is given up only where another could take its place."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass, field, replace
from typing import Any

from ft_launcher.core.events import JobChanged, NodeEvent, NodeUnfit, SignalArrived, StandbyOpened, ZygoteStarted
from ft_launcher.core.evidence import Address
from ft_launcher.core.node import NodeMachine, NodeOptions
from ft_launcher.core.placement import Placement
from ft_launcher.core.state import JobState, Phase
from ft_launcher.errors import PlatformError
from ft_launcher.shell.keys import Keys
from ft_launcher.shell.nvrx_requests import NvrxRequests
from monitors.nvrx_wire import UpdateConfigMsg, WorkloadAction, WorkloadControlRequest

KEYS = Keys("job")


@dataclass
class Entry:
    key: str


@dataclass
class Listing:
    entries: list[Entry]


@dataclass
class FakeStore:
    """Only what is asked: who is registered."""

    nodes: list[str]
    error: PlatformError | None = None

    async def list(self, prefix: str) -> Listing:
        if self.error is not None:
            raise self.error
        return Listing([Entry(prefix + node) for node in self.nodes])


@dataclass
class FakeJournal:
    kinds: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def record(self, kind: str, cycle: int | None, **fields: Any) -> None:
        self.kinds.append((kind, fields))


def job(**changes: Any) -> JobState:
    state = JobState(run_id="job", generation=0)
    return replace(state, phase=Phase.RUNNING, cycle=0, placement=Placement(nodes=("a",), nproc=2), master=Address("h", 1, True), **changes)


class Asked:
    """A node "a" with two ranks in cycle 0, a store with `nodes`, and what was fed and said."""

    def __init__(self, nodes: list[str], error: PlatformError | None = None, **state: Any) -> None:
        self.machine = NodeMachine(NodeOptions("a", 0))
        self.machine.handle(0.0, ZygoteStarted())
        self.machine.handle(0.0, StandbyOpened(Address("h", 1, True)))
        self.machine.handle(0.0, JobChanged(job(**state), 1))
        self.fed: list[NodeEvent] = []
        self.said: list[str] = []
        self.journal = FakeJournal()
        requests = NvrxRequests(self.machine, self._feed, self.said.append, self.journal)  # type: ignore[arg-type]
        self.told = requests.told(FakeStore(nodes, error), KEYS)  # type: ignore[arg-type]

    def _feed(self, event: NodeEvent) -> None:
        self.fed.append(event)
        self.machine.handle(0.0, event)

    def ask(self, *actions: WorkloadAction) -> Asked:
        async def main() -> None:
            for rank, action in enumerate(actions):
                self.told.request(rank, WorkloadControlRequest(rank, action, "ECC"))
            while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(tasks)

        asyncio.run(main())
        return self


def test_shutting_down_is_asked_once_however_many_ranks_ask() -> None:
    """A second stop signal would end the ranks at once."""
    asked = Asked(["a"]).ask(*[WorkloadAction.ShutdownWorkload] * 4)
    assert asked.fed == [SignalArrived(signal.SIGTERM)]
    assert asked.machine.report.signals == (15,)
    assert len(asked.said) == 1
    assert [kind for kind, _ in asked.journal.kinds] == ["nvrx-request"] * 4


def test_with_a_spare_the_node_is_unfit() -> None:
    asked = Asked(["a", "b"]).ask(WorkloadAction.ExcludeThisNode, WorkloadAction.ExcludeThisNode)
    assert asked.fed == [NodeUnfit(0, "rank 0 asked to exclude this node (ECC)")]
    assert asked.machine.report.unfit == "rank 0 asked to exclude this node (ECC)"
    assert asked.said == ["rank 0 asked to exclude this node (ECC): it counts as unfit"]


def test_without_a_spare_it_is_only_said() -> None:
    for nodes, state in ((["a"], {}), (["a", "b"], {"lost": {"b": "gone"}}), (["a", "b"], {"ruled_out": {"b": "x"}})):
        asked = Asked(nodes, **state).ask(WorkloadAction.ExcludeThisNode)
        assert asked.fed == []
        assert asked.said == ["rank 0 asked to exclude this node (ECC); there is no spare: the job goes on here"]
        assert asked.machine.report.unfit is None


def test_a_store_that_does_not_answer_costs_nothing() -> None:
    asked = Asked([], PlatformError("no answer", 69)).ask(WorkloadAction.ExcludeThisNode)
    assert asked.fed == []
    assert "cannot be told (no answer)" in asked.said[0]


def test_continue_is_only_noted() -> None:
    asked = Asked(["a", "b"]).ask(WorkloadAction.Continue)
    assert (asked.fed, asked.said) == ([], [])
    assert asked.journal.kinds[0][1]["action"] == "Continue"


def test_an_old_cycles_request_changes_nothing() -> None:
    asked = Asked(["a", "b"])
    assert asked.machine.handle(0.0, NodeUnfit(-1, "old")) == []
    assert asked.machine.report.unfit is None


def test_a_clients_timeouts_are_in_the_journal() -> None:
    asked = Asked(["a"])
    asked.told.timeouts(1, UpdateConfigMsg({"step": 2.0}, 3.0))
    assert asked.journal.kinds == [("nvrx-timeouts", {"rank": 1, "sections": {"step": 2.0}, "out_of_section_s": 3.0, "heartbeat_s": None})]
