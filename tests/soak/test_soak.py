"""Minutes of random faults on several nodes, with a checker: `make soak`. FT_SOAK_S is how long (600), FT_SOAK_SEED which faults.

Five agents, three of them active with two ranks each, every one over a way of its own to the store. Ranks, zygotes, agents and whole nodes are killed, stopped and cut off, the
store is frozen and restarted. What must hold: at no time two living ranks with the same number in the same cycle, a placement that is a bijection, commits monotonic in cycle and
never lost, no agent that ends by itself, and in the end the job finishes with 0 everywhere.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.multinode.cluster import Cluster, Detour, Node
from tests.store.etcd_server import EtcdServer

SOAK_S = float(os.environ.get("FT_SOAK_S", "600"))
SEED = int(os.environ.get("FT_SOAK_SEED", str(random.randrange(10**6))))
NODES = ("a", "b", "c", "d", "e")
MOST_DOWN = 2
STUCK_S = 90.0
OPTIONS = (
    "--max-restarts",
    "1000000",
    "--no-progress-cycles",
    "1000000",
    "--timeouts",
    "setup=30,step=6",
    "--out-of-section",
    "30",
    "--store-timeout",
    "60",
    "--fixed-timeouts",
)

pytestmark = [pytest.mark.soak, pytest.mark.serial, pytest.mark.timeout(SOAK_S + 400)]


class Storm:
    """What is done to the cluster, and what is under way. Every fault has a time at which it is healed."""

    def __init__(self, job: Cluster, etcd: EtcdServer, ways: dict[str, Detour]) -> None:
        self.job, self.etcd, self.ways = job, etcd, ways
        self.random = random.Random(SEED)
        self.count: Counter[str] = Counter()
        self.log: list[str] = []
        self.healing: list[tuple[float, str, Callable[[], None]]] = []
        self.hurt: set[str] = set()
        self.expected: set[int] = set()
        self.bad: list[str] = []

    def start(self, node_id: str) -> None:
        self.job.start(node_id, options=OPTIONS, way=self.ways[node_id], until=str(self.job.folder / "enough"), save_every=3)

    def strike(self) -> None:
        """One fault, on somebody who has none yet."""
        kinds: list[tuple[Callable[[Node], None], int]] = [
            (self.kill_rank, 6), (self.stop_rank, 2), (self.kill_zygote, 1), (self.kill_agent, 3), (self.power_off, 4), (self.freeze, 4), (self.cut, 4), (self.slow, 1),
            (self.freeze_store, 1), (self.restart_store, 1), (self.kill_controller, 2), (self.stop_zygote, 1),
        ]  # fmt: skip
        fault = self.random.choices([k for k, _ in kinds], [w for _, w in kinds])[0]
        well = [n for n in NODES if n not in self.hurt and self.job[n].running()]
        if well and len(self.hurt) < MOST_DOWN:
            victim = self.random.choice(well)
            self.log.append(f"{time.monotonic():.1f} {fault.__name__} {victim}")
            self.count[fault.__name__] += 1
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                fault(self.job[victim])

    def heal_due(self, everything: bool = False) -> None:
        for item in list(self.healing):
            at, node_id, heal = item
            if everything or time.monotonic() >= at:
                self.healing.remove(item)
                heal()
                self.hurt.discard(node_id)

    def hurts(self, node_id: str, seconds: float, heal: Callable[[], None]) -> None:
        self.hurt.add(node_id)
        self.healing.append((time.monotonic() + seconds, node_id, heal))

    def revive(self, node: Node) -> Callable[[], None]:
        self.expected.add(node.pid)

        def again() -> None:
            node.end()
            self.start(node.node_id)

        return again

    # -- faults

    def kill_rank(self, node: Node) -> None:
        ranks = node.ranks()
        if ranks:
            os.kill(self.random.choice(ranks), signal.SIGKILL)

    def stop_rank(self, node: Node) -> None:
        ranks = node.ranks()
        if ranks:
            os.kill(self.random.choice(ranks), signal.SIGSTOP)

    def kill_zygote(self, node: Node) -> None:
        """Beyond a bound the node counts as unfit from then on: its agent is started anew some time later."""
        node.zygote().kill()
        self.hurts(node.node_id, 6, self.revive(node))

    def stop_zygote(self, node: Node) -> None:
        node.zygote().suspend()
        self.hurts(node.node_id, 6, self.revive(node))

    def kill_agent(self, node: Node) -> None:
        node.kill_agent()
        self.hurts(node.node_id, self.random.uniform(0, 4), self.revive(node))

    def power_off(self, node: Node) -> None:
        node.power_off()
        self.hurts(node.node_id, self.random.uniform(0, 4), self.revive(node))

    def kill_controller(self, _: Node) -> None:
        leader = (self.job.stored("leader") or {}).get("node")
        if leader in NODES and leader not in self.hurt and self.job[leader].running():
            self.power_off(self.job[leader])

    def freeze(self, node: Node) -> None:
        frozen = node.freeze()
        self.hurts(node.node_id, self.random.choice((0.5, 2, 5, 9)), lambda: node.thaw(frozen))

    def cut(self, node: Node) -> None:
        way = self.ways[node.node_id]
        way.cut()
        self.hurts(node.node_id, self.random.choice((0.5, 2, 5, 9)), way.mend)

    def slow(self, node: Node) -> None:
        way = self.ways[node.node_id]
        way.slow(0.2)
        self.hurts(node.node_id, 5, lambda: way.slow(0.0))

    def freeze_store(self, _: Node) -> None:
        self.etcd.pause()
        time.sleep(self.random.choice((0.3, 1, 4)))
        self.etcd.resume()

    def restart_store(self, _: Node) -> None:
        self.etcd.kill()
        time.sleep(self.random.choice((0.0, 1, 4)))
        self.etcd.start()

    # -- the eye

    def look(self) -> None:
        """An agent that ended by itself is a bug."""
        for node in self.job.all:
            code = node.process.poll()
            if code is not None and node.pid not in self.expected:
                self.expected.add(node.pid)
                self.bad.append(f"agent {node.node_id} ended with {code}:\n{node.said()[-3000:]}")
        doubles = list(self.job.marks.glob("DOUBLE.*"))
        assert not doubles, f"two living ranks of one number in one cycle: {doubles}"
        assert not self.bad, "\n".join(self.bad)


@pytest.fixture
def storm(tmp_path: Path) -> Iterator[Storm]:
    etcd = EtcdServer(tmp_path).start()
    job = Cluster(tmp_path, [etcd.endpoint], "soak", nnodes=3, nproc=2)
    ways = {n: Detour(etcd.endpoint) for n in NODES}
    try:
        yield Storm(job, etcd, ways)
    finally:
        etcd.resume()
        job.close()
        for way in ways.values():
            way.close()
        etcd.kill()


def total(job: Cluster) -> int:
    path = job.marks / "steps.0"
    return path.stat().st_size if path.exists() else 0


def test_soak(storm: Storm, capsys: pytest.CaptureFixture[str]) -> None:
    job = storm.job
    for node_id in NODES:
        storm.start(node_id)
    job.until_step(0)
    began = moved_at = time.monotonic()
    at, longest = total(job), 0.0
    try:
        while time.monotonic() - began < SOAK_S:
            storm.heal_due()
            storm.look()
            if storm.random.random() < 0.06:
                storm.strike()
            now = total(job)
            if now != at:
                longest = max(longest, time.monotonic() - moved_at)
                at, moved_at = now, time.monotonic()
            assert time.monotonic() - moved_at < STUCK_S, f"no step for {STUCK_S} s"
            time.sleep(0.1)
        storm.heal_due(everything=True)
        # a registration may still be a killed predecessor's; who has said the banner has joined
        job.until(lambda: all("ft-launch run" in job[n].said() and job.stored(f"nodes/{n}") for n in NODES), "all are there again")
        (job.folder / "enough").touch()
        for node_id in NODES:
            assert job[node_id].wait(STUCK_S) == 0, node_id
        job.check()
        assert job.verdict()["outcome"] == "finished"
    except AssertionError as error:
        raise AssertionError(
            f"{error}\nFT_SOAK_SEED={SEED} {dict(storm.count)}\n" + "\n".join(storm.log[-30:]) + "\n" + job.story()[-20_000:]
        ) from None
    with capsys.disabled():
        commits = Counter(x["what"] for x in job.lines("commits.jsonl"))
        recoveries = sorted(e["seconds"] for e in job.journal("recovered"))
        print(
            f"\nsoak: seed {SEED}, {time.monotonic() - began:.0f} s, {sum(storm.count.values())} faults {dict(storm.count)}; {job.verdict()['cycles']} cycles, "
            f"{len(at_steps(job))} steps, checkpoints {dict(commits)}; longest pause {longest:.1f} s; "
            f"recovery median {recoveries[len(recoveries) // 2]:.2f} s, worst {recoveries[-1]:.2f} s of {len(recoveries)}"
        )


def at_steps(job: Cluster) -> list[str]:
    return (job.marks / "steps.0").read_text().split()
