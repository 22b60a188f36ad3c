"""Several agents on this machine as if each were a node, over a real etcd; what they and their ranks leave is read as evidence.

`Cluster` starts agents of one run, waits for what happens (generous deadlines, never a sleep that hopes) and takes everything down. A node can be killed whole, its agent alone,
frozen and woken; its way to the store can lead through a `Detour` that cuts or delays.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from ft_launcher.config import StoreOptions
from ft_launcher.shell.etcd import EtcdStore
from tests.store.proxy import Proxy

WORKER = Path(__file__).with_name("worker.py")
NO_TORCH = Path(__file__).with_name("notorch")
PATIENCE_S = 90.0
SAVE_S = 1.5
"""A rank that leaves so long after it was told breaks nobody's connection who has yet to be told."""


def alive(pid: int) -> bool:
    """Zombies count as gone."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pids: Sequence[int], within_s: float) -> bool:
    """True once none of the processes lives."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return not any(alive(pid) for pid in pids)


class Detour:
    """A proxy before the store, in a thread of its own: the way of one agent. `cut` is silence, as when a cable is pulled; `mend` ends it."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._ready, self._end = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        async with Proxy(self._target) as self.proxy:
            self.endpoint = self.proxy.endpoint
            self._ready.set()
            await self._end.wait()

    def cut(self) -> None:
        self.proxy.swallow_requests = self.proxy.swallow_answers = True

    def mend(self) -> None:
        """What was under way is lost: the connections have to be made again."""
        self._loop.call_soon_threadsafe(self.proxy.cut)
        self.proxy.swallow_requests = self.proxy.swallow_answers = False

    def slow(self, delay_s: float) -> None:
        self.proxy.delay_s = delay_s

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(PATIENCE_S)


class Node:
    """One agent, standing for one machine."""

    def __init__(self, node_id: str, folder: Path, command: list[str], env: dict[str, str], prefix: Sequence[str] = ()) -> None:
        self.node_id = node_id
        self.folder = folder
        self.err = folder / f"{node_id}.err"
        self.began_at = self.err.stat().st_size if self.err.exists() else 0
        with (folder / f"{node_id}.out").open("ab") as out, self.err.open("ab") as err:
            self.process = subprocess.Popen([*prefix, *command], cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env)

    @property
    def pid(self) -> int:
        return self.process.pid

    def said(self) -> str:
        """What this agent has said (not a predecessor of the same id)."""
        return self.err.read_bytes()[self.began_at :].decode(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """The agent and everything below it, the agent first; none once it has ended, for its number may be somebody else's by then."""
        if not self.running():
            return []
        try:
            agent = psutil.Process(self.pid)
            return [agent, *agent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def tree(self) -> list[int]:
        """Their pids."""
        return [process.pid for process in self.processes()]

    def zygote(self) -> psutil.Process:
        """NoSuchProcess where there is none."""
        if not self.running():
            raise psutil.NoSuchProcess(self.pid)
        children = psutil.Process(self.pid).children()
        if not children:
            raise psutil.NoSuchProcess(self.pid)
        return children[0]

    def ranks(self) -> list[int]:
        """The pids of the ranks that run here."""
        found = []
        for process in self.processes()[1:]:
            with suppress(psutil.Error):
                if "[rank " in " ".join(process.cmdline()):
                    found.append(process.pid)
        return found

    @staticmethod
    def signal_all(processes: Sequence[psutil.Process], number: int) -> None:
        """All at once, as far as that goes. psutil refuses a number that has become another process's."""
        for process in processes:
            with suppress(psutil.Error):
                process.send_signal(number)

    def power_off(self) -> None:
        """The whole node ends, without a word."""
        processes = self.freeze()
        self.signal_all(processes, signal.SIGKILL)

    def freeze(self) -> list[psutil.Process]:
        """Stop everything; what is returned wakes it up again with `thaw`."""
        processes = self.processes()
        self.signal_all(processes, signal.SIGSTOP)
        return processes

    def thaw(self, processes: Sequence[psutil.Process]) -> None:
        self.signal_all(processes, signal.SIGCONT)

    def kill_agent(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"agent {self.node_id} did not end within {timeout_s} s:\n{self.said()}") from None

    def running(self) -> bool:
        return self.process.poll() is None

    def end(self) -> None:
        """Whatever state it is in."""
        processes = self.processes()
        pids = [process.pid for process in processes]
        self.signal_all(processes, signal.SIGKILL)
        self.process.wait()
        assert gone(pids, 20), f"left of {self.node_id}: {[p for p in pids if alive(p)]}"


class Cluster:
    """The agents of one run over one store."""

    def __init__(
        self, folder: Path, endpoints: Sequence[tuple[str, int]], run_id: str = "run", nnodes: int = 2, nproc: int = 1, ttl_s: float = 2.0
    ) -> None:
        self.folder = folder
        self.endpoints = tuple(endpoints)
        self.run_id, self.nnodes, self.nproc, self.ttl_s = run_id, nnodes, nproc, ttl_s
        self.marks = folder / "marks"
        self.marks.mkdir(parents=True, exist_ok=True)
        self.pace = folder / "pace"
        self.nodes: dict[str, Node] = {}
        self.all: list[Node] = []
        self.conf: dict[str, Any] = {"steps": 100_000, "marks": str(self.marks), "pace": str(self.pace)}
        self.set_pace(0.05)
        self.options: tuple[str, ...] = ()

    # -- agents -------------------------------------------------------------------------------------------------------------------------------

    def start(
        self, *node_ids: str, options: Sequence[str] = (), way: Detour | None = None, env: dict[str, str] | None = None, script: list[str] | None = None,
        prefix: Sequence[str] = (), torch: bool = False, **conf: Any,
    ) -> Cluster:  # fmt: skip
        """Start agents with the same command line."""
        for node_id in node_ids:
            places = ",".join(f"{_bracket(host)}:{port}" for host, port in ([way.endpoint] if way else self.endpoints))
            given = {o for o in (*self.options, *options) if o.startswith("--")}
            defaults = {
                "--nnodes": str(self.nnodes), "--nproc-per-node": str(self.nproc), "--store": f"etcd://{places}", "--run-id": self.run_id, "--node-ttl": f"{self.ttl_s:g}",
                "--tee": "none", "--node-id": node_id, "--log-dir": str(self.folder / "logs"), "--ft-state": str(self.folder / "ft_state.json"), "--preload": "json",
            }  # fmt: skip
            flags = [word for name, value in defaults.items() if name not in given for word in (name, value)]
            told = script or [str(WORKER), json.dumps({**self.conf, **conf})]
            command = [sys.executable, "-m", "ft_launcher", *flags, *self.options, *options, *told]
            path = os.pathsep.join(p for p in ("" if torch else str(NO_TORCH), os.environ.get("PYTHONPATH", "")) if p)
            node = Node(node_id, self.folder, command, {**os.environ, "PYTHONPATH": path, **(env or {})}, prefix)
            self.nodes[node_id] = node
            self.all.append(node)
        return self

    def add_spares(self, *node_ids: str, **given: Any) -> Cluster:
        """Start agents while the job runs, and wait until they could take over."""
        self.start(*node_ids, **given)
        self.until(lambda: all((self.stored(f"reports/{n}") or {}).get("standby") for n in node_ids), f"{node_ids} ready as spares")
        return self

    def __getitem__(self, node_id: str) -> Node:
        return self.nodes[node_id]

    def close(self) -> None:
        for node in self.all:
            node.end()

    # -- waiting ------------------------------------------------------------------------------------------------------------------------------

    def until(self, what: Callable[[], Any], why: str, within_s: float = PATIENCE_S) -> Any:
        """What `what` gives once it is true; what everybody said otherwise."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            ended = not any(node.running() for node in self.all)
            if found := what():
                return found
            if ended:
                break  # nobody is left who could make it true
            time.sleep(0.03)
        if found := what():
            return found
        raise AssertionError(f"{why} did not come within {within_s:g} s:\n{self.story()}")

    def story(self) -> str:
        return "\n".join(f"== {n.node_id} ({n.process.poll()})\n{n.said()[-3000:]}" for n in self.all)

    def until_step(self, cycle: int, more: int = 1, within_s: float = PATIENCE_S) -> dict[str, list[int]]:
        """All ranks have completed `more` steps of the cycle; returns who holds which ranks."""
        world = self.nnodes * self.nproc
        self.until(lambda: all(len(self.steps(r, cycle)) >= more for r in range(world)), f"step {more} of cycle {cycle}", within_s)
        return self.holders(cycle)

    def signal_rank(self, rank: int, number: int = signal.SIGKILL) -> None:
        """To the newest process of a rank."""
        process = psutil.Process([x["pid"] for x in self.life() if x["rank"] == rank][-1])
        assert f"[rank {rank}]" in " ".join(process.cmdline()), "its number is another process's by now"
        process.send_signal(number)

    def until_said(self, node_id: str, text: str, within_s: float = PATIENCE_S) -> str:
        node = self[node_id]
        found: str = self.until(lambda: node.said() if text in node.said() else "", f"{text!r} of {node_id}", within_s)
        return found

    def finish(self) -> None:
        """No further step takes long, and the job ends: only for jobs with a finite number of steps."""
        self.set_pace(0.0)

    def set_pace(self, step_s: float) -> None:
        fresh = self.pace.with_suffix(".new")
        fresh.write_text(str(step_s))
        fresh.replace(self.pace)

    # -- evidence -----------------------------------------------------------------------------------------------------------------------------

    def lines(self, name: str) -> list[dict[str, Any]]:
        path = self.marks / name
        return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []

    def life(self, cycle: int | None = None) -> list[dict[str, Any]]:
        return [x for x in self.lines("life.jsonl") if cycle is None or x["cycle"] == cycle]

    def cycle(self) -> int:
        """The highest one that any rank has begun."""
        return max((x["cycle"] for x in self.life()), default=-1)

    def steps(self, rank: int, cycle: int) -> list[int]:
        path = self.marks / f"steps.{rank}"
        said = path.read_text().split() if path.exists() else []
        return [int(i) for c, i in (s.split(":") for s in said) if int(c) == cycle]

    def holders(self, cycle: int) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for x in self.life(cycle):
            found.setdefault(x["node"], []).append(x["rank"])
        return {node: sorted(ranks) for node, ranks in found.items()}

    def holder(self, rank: int, cycle: int) -> str:
        return next(node for node, ranks in self.holders(cycle).items() if rank in ranks)

    def journal(self, kind: str) -> list[dict[str, Any]]:
        found = []
        for path in sorted((self.folder / "logs").glob("*/journal.*.jsonl")):
            for line in path.read_text(errors="replace").splitlines():
                with suppress(ValueError):
                    event = json.loads(line)
                    if event["kind"] == kind:
                        found.append(event)
        return found

    def decisions(self) -> list[dict[str, Any]]:
        return sorted(self.journal("decision"), key=lambda e: e["cycle"])

    def verdict(self, generation: int = 0) -> dict[str, Any]:
        doc: dict[str, Any] = json.loads((self.folder / "logs" / f"{self.run_id}.{generation}" / "verdict.json").read_text())
        return doc

    def stored(self, name: str) -> dict[str, Any] | None:
        """A key of the run, as the store has it."""

        async def read() -> str | None:
            store = EtcdStore(StoreOptions(kind="etcd", endpoints=self.endpoints, timeout_s=20))
            try:
                entry = await store.get(f"/ft/v1/{self.run_id}/{name}")
            finally:
                await store.close()
            return entry.value if entry is not None else None

        value = asyncio.run(read())
        return json.loads(value) if value is not None else None

    def leader(self) -> str:
        """The node whose agent is the controller."""
        said = self.until(lambda: self.stored("leader"), "a controller")
        return str(said["node"])

    def check(self) -> None:
        """What must hold in every run, whatever happened."""
        assert not list(self.marks.glob("DOUBLE.*")), f"two living ranks of one number in one cycle: {list(self.marks.glob('DOUBLE.*'))}"
        places: dict[tuple[tuple[int, int], int], tuple[str, int]] = {}
        for x in self.life():
            place, cycle = (x["node"], x["slot"]), (x["generation"], x["cycle"])
            assert places.setdefault((cycle, x["rank"]), place) == place, f"rank {x['rank']} in two places in cycle {cycle}"
        for cycle in {c for c, _ in places}:
            taken = [place for (c, _), place in places.items() if c == cycle]
            assert len(set(taken)) == len(taken), f"two ranks in one place in cycle {cycle}: {taken}"
        self._check_commits()

    def _check_commits(self) -> None:
        claims = [x for x in self.lines("commits.jsonl") if x["what"] == "claim"]
        by_fence = [(x["generation"], x["cycle"]) for x in sorted(claims, key=lambda x: x["fence"])]
        assert by_fence == sorted(by_fence), f"an old cycle has claimed the checkpoints after a newer one: {by_fence}"
        commits = [x for x in self.lines("commits.jsonl") if x["what"] == "commit"]
        for claim in claims:
            owned = [x["i"] for x in commits if x["fence"] < claim["fence"]]
            assert claim["i"] >= max(owned, default=-1), f"committed steps were lost: {claim} after {max(owned, default=-1)}"


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host
