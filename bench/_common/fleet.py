"""Several agents of one contestant on this machine, each standing for a node: two hold ranks, further ones wait.

Every agent has a session of its own and is told apart by its process; what runs below it is its node. A node is killed or stopped by the ids of exactly these processes, and all is
ended when the `with` block is left. ft-launch gets an etcd of its own. torchrun and NVRx keep their rendezvous in their first agent: that one is no ordinary node.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from _common.contestants import BIN, FT, MAX_RESTARTS, NVRX, SCRIPTS, TORCHRUN, environment
from _common.etcd import Etcd, Watch
from _common.processes import BenchError, below, free_port, kill_below, kill_rank
from _common.stamps import Stamps
from ft_launcher.shell.keys import Keys

NODES, NPROC = 2, 2
SETTLE_S = 1.5
MIN_STEPS = 3
START_LIMIT_S = 120.0
JOINED_S = 8.0
"""How long an agent of the others, which cannot be asked, is given to import torch and join."""
POLL_S = 0.02
TAIL_BYTES = 1500
RUN_ID = "bench"
HAND_OVERS = 5


@dataclass(frozen=True, slots=True)
class Agent:
    """One node."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def tree(self) -> list[int]:
        """The agent, if it still runs, and everything below it."""
        if self.process.poll() is not None:
            return []
        return [self.process.pid, *(process.pid for process in below(self.process.pid))]


class Fleet:
    """The agents of one job: `ttl_s` is ft-launch's --node-ttl. Start agents with `start`, ask and hurt them by name."""

    def __init__(self, contestant: str, folder: Path, ttl_s: float = 10.0) -> None:
        self.contestant = contestant
        self.ttl_s = ttl_s
        self.agents: dict[str, Agent] = {}
        self.folder = folder
        self.port = free_port()
        self._stack = ExitStack()
        self._keys = Keys(RUN_ID)
        self._started = 0

    def __enter__(self) -> Fleet:
        (self.folder / "tmp").mkdir(parents=True)
        self.stamps = Stamps(self.folder / "stamps", NODES * NPROC)
        self._env = environment(self.stamps, self.folder / "tmp")
        if self.contestant == FT:
            self.etcd = self._stack.enter_context(Etcd(self.folder / "etcd"))
            self.watch = self._stack.enter_context(Watch(self.etcd, self._keys.root))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()
        kill_below()

    # -- agents -------------------------------------------------------------------------------------------------------------------------------

    def start(self, *names: str) -> None:
        """Start agents, with the same command line but for the node's name."""
        for name in names:
            log = self.folder / f"{name}.log"
            with log.open("ab") as output:
                command = ["setpriv", "--pdeathsig", "TERM", *_COMMANDS[self.contestant](self, name), str(SCRIPTS / "steps.py")]
                process = subprocess.Popen(
                    command, env=self._env, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
                )
            self.agents[name] = Agent(name, process, log)

    def start_spare(self) -> str:
        """One more agent, which waits; ready when this returns, as far as the contestant lets one know."""
        self._started += 1
        name = f"s{self._started}"
        self.start(name)
        if self.contestant == FT:
            self.wait_for(lambda: bool((self.stored(self._keys.report(name)) or {}).get("standby")), f"spare {name} ready", START_LIMIT_S)
        else:
            time.sleep(JOINED_S)
        return name

    def kill_agent(self, name: str) -> int:
        """SIGKILL the agent's process alone; CLOCK_MONOTONIC nanoseconds just before."""
        process = self.agents[name].process
        if process.poll() is not None:
            raise BenchError(f"agent {name} ended with {process.returncode} before it was killed:\n{self.tail()}")
        at_ns = time.monotonic_ns()
        os.kill(process.pid, signal.SIGKILL)
        return at_ns

    def kill_rank(self, rank: int) -> int:
        """SIGKILL the process of a rank; nanoseconds just before."""
        return kill_rank(self.stamps.pids()[rank])

    def alive(self, name: str) -> bool:
        """Whether the agent still runs."""
        return name in self.agents and self.agents[name].process.poll() is None

    def wait_listening(self) -> None:
        """Until the first agent keeps the rendezvous."""
        self.wait_for(self._listening, "rendezvous", START_LIMIT_S)

    def _listening(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def freeze(self, name: str) -> int:
        """SIGSTOP the agent and everything below it; nanoseconds just before."""
        pids = self.agents[name].tree()
        at_ns = time.monotonic_ns()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        return at_ns

    def remove(self, name: str) -> None:
        """End what is left of a node and forget it."""
        agent = self.agents.pop(name)
        for pid in agent.tree():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.process.wait()

    def holder(self, rank: int) -> str:
        """The node that runs a rank."""
        pid = self.stamps.pids()[rank]
        return next((name for name, agent in self.agents.items() if pid in agent.tree()), "")

    def holders(self) -> list[str]:
        """The nodes that run ranks, in rank order."""
        return list(dict.fromkeys(self.holder(rank) for rank in range(self.stamps.world)))

    # -- what the store says (ft-launch) ----------------------------------------------------------------------------------------------------------

    def stored(self, key: str) -> Any:
        """A key's value, None where there is none."""
        entry = self.watch.get(key)
        return json.loads(entry.value) if entry is not None else None

    def controller(self) -> str:
        """The node whose agent decides."""
        self.wait_for(lambda: self.watch.get(self._keys.leader) is not None, "a controller", START_LIMIT_S)
        return str(self.stored(self._keys.leader)["node"])

    def hand_over(self) -> str:
        """Make the office vacant until a node without ranks holds it: that is where a controller is meant to be. Returns its name."""
        for _ in range(HAND_OVERS):
            name = self.controller()
            if name not in self.holders():
                return name
            at_ns = time.monotonic_ns()
            self.watch.delete(self._keys.leader)
            self._wait_decided(at_ns, name)
        raise BenchError(f"the office stays with nodes that hold ranks:\n{self.tail()}")

    def _wait_decided(self, after_ns: int, but: str) -> None:
        self.wait_for(lambda: self.deciding_since(after_ns, but) is not None, "another controller", START_LIMIT_S)

    def deciding_since(self, after_ns: int, but: str) -> int | None:
        """When a controller on another node than `but` was first seen to have written the job state after `after_ns`."""
        elected = False
        for seen in list(self.watch.history):
            entry, key = seen.change.entry, seen.change.key
            if seen.at_ns <= after_ns:
                continue
            if key == self._keys.leader:
                elected = entry is not None and json.loads(entry.value)["node"] != but
            elif key == self._keys.job and elected:
                return seen.at_ns
        return None

    # -- waiting ------------------------------------------------------------------------------------------------------------------------------------

    def wait_for(self, done: Callable[[], bool], what: str, limit_s: float) -> None:
        """Poll until `done()`. Raises BenchError when `limit_s` pass or no agent is left."""
        end = time.monotonic() + limit_s
        while not done():
            if time.monotonic() > end:
                raise BenchError(f"{self.contestant}: no {what} within {limit_s:.0f} s:\n{self.tail()}")
            if all(agent.process.poll() is not None for agent in self.agents.values()) and not done():
                raise BenchError(f"{self.contestant}: all agents have ended while waiting for {what}:\n{self.tail()}")
            time.sleep(POLL_S)

    def settle(self) -> None:
        """Until every rank has made some steps and has run for `SETTLE_S`."""
        self.wait_for(lambda: self.stamps.first_on_all("step") is not None, "first step of all ranks", START_LIMIT_S)
        pids = self.stamps.pids()
        begun_ns = time.monotonic_ns() + int(SETTLE_S * 1e9)
        self.wait_for(lambda: self.stamps.first_on_all("step", begun_ns) is not None, "training", START_LIMIT_S)
        self.wait_for(lambda: self.stamps.fewest("step", pids) >= MIN_STEPS, f"{MIN_STEPS} steps", START_LIMIT_S)

    def tail(self) -> str:
        """The end of what each agent printed."""
        parts = [
            f"-- {a.name} ({a.process.poll()})\n{a.log.read_bytes()[-TAIL_BYTES:].decode(errors='replace')}" for a in self.agents.values()
        ]
        return "\n".join(parts)


def _ft_launch(fleet: Fleet, name: str) -> Sequence[str]:
    options = [
        "--nnodes",
        NODES,
        "--nproc-per-node",
        NPROC,
        "--tp",
        2,
        "--max-restarts",
        MAX_RESTARTS,
        "--preload",
        "torch",
        "--tee",
        "none",
    ]
    hangs = ["--timeouts", "setup=300,step=300,checkpointing=300", "--out-of-section", "300"]
    store = ["--store", f"etcd://{fleet.etcd.address}", "--run-id", RUN_ID, "--node-id", name, "--node-ttl", f"{fleet.ttl_s:g}"]
    return [str(BIN / "ft-launch"), *map(str, options), *hangs, *store, "--log-dir", str(fleet.folder / "logs")]


def _rendezvous(fleet: Fleet) -> list[str]:
    at = f"--rdzv-endpoint=127.0.0.1:{fleet.port}"
    return [
        f"--nnodes={NODES}:{NODES}",
        f"--nproc-per-node={NPROC}",
        f"--max-restarts={MAX_RESTARTS}",
        "--rdzv-backend=c10d",
        at,
        "--rdzv-id=j",
    ]


def _torchrun(fleet: Fleet, name: str) -> Sequence[str]:
    return [str(BIN / "torchrun"), *_rendezvous(fleet), "--local-addr=127.0.0.1"]


def _nvrx(fleet: Fleet, name: str) -> Sequence[str]:
    config = fleet.folder / "ft.yaml"
    config.write_text(
        "fault_tolerance: {rank_section_timeouts: {setup: 300, step: 300, checkpointing: 300}, rank_out_of_section_timeout: 300, log_level: ERROR}\n"
    )
    return [str(BIN / "ft_launcher"), *_rendezvous(fleet), "--local-addr=127.0.0.1", f"--ft-cfg-path={config}"]


_COMMANDS: dict[str, Callable[[Fleet, str], Sequence[str]]] = {FT: _ft_launch, TORCHRUN: _torchrun, NVRX: _nvrx}
