"""Joining a run: which generation, the same job on every node, and a node id of one's own.

A generation is one launch of a run id. An agent belongs to the generation that lives; where none does (all were killed, or it has ended) it begins the next one, and every compare
is on the store's revisions so that of many agents starting together exactly one does. What an older generation left is overwritten, never obeyed.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ft_launcher.config import Config
from ft_launcher.core.evidence import NodeInfo
from ft_launcher.core.state import JobState, Outcome, Phase
from ft_launcher.errors import ConfigError
from ft_launcher.shell.keys import Keys
from ft_launcher.shell.store import Compare, Created, Delete, Entry, Modified, Operation, Put, Store

Say = Callable[[str], None]
MARGIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Joined:
    """This agent is part of a generation: registered under its node id, bound to a lease."""

    generation: int
    lease: int


class FinishedError(Exception):
    """The run has finished already; `code` is what a late agent ends with."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def spec_of(config: Config, environ: Mapping[str, str]) -> dict[str, str]:
    """What must be the same on every node, as text, by the name a person knows it by; `launch` tells one scheduler's launch from the next."""
    topology = config.topology
    degrees = {name: str(getattr(topology, name)) for name in ("tp", "pp", "cp", "ep", "etp")}
    job, restart = environ.get("SLURM_JOB_ID"), environ.get("SLURM_RESTART_COUNT", "0")
    return {
        **degrees,
        "rank-order": topology.order,
        "nnodes": str(config.nnodes),
        "nproc-per-node": str(config.nproc),
        "world size": str(topology.world),
        "script": " ".join(config.command.target),
        "script arguments": " ".join(config.command.args),
        "launch": f"{job}.{restart}" if job else "",
    }


class Joiner:
    """One attempt to join. `say` tells people what is waited for."""

    def __init__(self, store: Store, keys: Keys, config: Config, spec: Mapping[str, str], say: Say) -> None:
        self._store = store
        self._keys = keys
        self._config = config
        self._spec = dict(spec)
        self._say = say

    async def join(self, info: Callable[[int], NodeInfo]) -> Joined:
        """Register `info(generation)`. Raises ConfigError (another job, or the node id is in use), FinishedError, PlatformError (the store)."""
        await self._wait_for_own_id()
        generation = await self._generation()
        while True:
            lease = await self._store.grant(self._config.node_ttl_s)
            key = self._keys.node(self._config.node_id)
            put: list[Operation] = [
                Put(key, json.dumps(info(generation).to_json()), lease),
                Delete(self._keys.report(self._config.node_id)),
            ]
            if (await self._store.transact([Created(key, 0)], put)).succeeded:
                return Joined(generation, lease)
            await self._store.revoke(lease)
            await self._wait_for_own_id()

    async def secret(self) -> str:
        """What opens the channel between the agents of this run; made by the first of them."""
        key = self._keys.secret
        await self._store.transact([Created(key, 0)], [Put(key, secrets.token_hex(16))])
        entry = await self._store.get(key)
        if entry is None:
            return await self.secret()
        return entry.value

    async def _wait_for_own_id(self) -> None:
        """A dead predecessor's registration ends with its lease; a live one's does not."""
        key, ttl_s = self._keys.node(self._config.node_id), self._config.node_ttl_s
        entry = await self._store.get(key)
        if entry is None:
            return
        self._say(
            f"node id {self._config.node_id} is registered already: waiting up to {ttl_s + MARGIN_S:g} s to see whether its agent lives"
        )
        for _ in range(int((ttl_s + MARGIN_S) / 0.1)):
            await asyncio.sleep(0.1)
            now = await self._store.get(key)
            if now is None or now.created != entry.created:
                break
        else:
            raise ConfigError(self._held(entry))
        if now is not None:
            raise ConfigError(self._held(now))

    def _held(self, entry: Entry) -> str:
        holder = NodeInfo.from_json(json.loads(entry.value))
        return f"--node-id {holder.node_id}: run {self._config.run_id} has a live agent of this id at {holder.address}; choose another --node-id, or another --run-id"

    async def _generation(self) -> int:
        """The generation that lives, or a new one."""
        while True:
            job, spec = await self._store.get(self._keys.job), await self._store.get(self._keys.spec)
            if job is None:
                begun = await self._begin(0, [Created(self._keys.job, 0)])
            else:
                state = JobState.from_json(json.loads(job.value))
                if await self._lives(state, spec):
                    return state.generation
                begun = await self._begin(state.generation + 1, [Modified(self._keys.job, job.modified)])
            if begun is not None:
                return begun

    async def _begin(self, generation: int, compares: list[Compare]) -> int | None:
        fresh = JobState(self._config.run_id, generation)
        puts = [
            Put(self._keys.job, json.dumps(fresh.to_json())),
            Put(self._keys.spec, json.dumps({**self._spec, "generation": generation})),
        ]
        return generation if (await self._store.transact(compares, puts)).succeeded else None

    async def _lives(self, state: JobState, spec: Entry | None) -> bool:
        """Whether the stored generation is the one to join. Raises where this agent must not be here at all."""
        known = json.loads(spec.value) if spec is not None else {}
        same_launch = bool(self._spec["launch"]) and known.get("launch") == self._spec["launch"]
        present = (await self._store.list(self._keys.nodes)).entries
        if state.phase is Phase.DONE:
            return await self._ended(state, same_launch)
        if not present and await self._store.get(self._keys.leader) is None and not same_launch:
            return False
        self._compare(known, present)
        return True

    async def _ended(self, state: JobState, same_launch: bool) -> bool:
        """The generation is over: late agents of it learn so; anybody who was there before means to run it again."""
        was_there = await self._store.get(self._keys.report(self._config.node_id)) is not None
        verdict = state.verdict
        finished = verdict is not None and verdict.outcome is Outcome.FINISHED
        if same_launch or (finished and not was_there and not self._spec["launch"]):
            said = f"{verdict.outcome.value}: {verdict.reason}" if verdict is not None else "ended"
            raise FinishedError(f"run {self._config.run_id} has ended already ({said}); nothing to do here", 0)
        return False

    def _compare(self, known: Mapping[str, Any], present: tuple[Entry, ...]) -> None:
        """Refuse to take part in a different job; both values are named."""
        holder = NodeInfo.from_json(json.loads(present[0].value)).node_id if present else "another node"
        for name, mine in self._spec.items():
            theirs = str(known.get(name, mine))
            if name == "launch" and mine != theirs:
                raise ConfigError(
                    f"--run-id {self._config.run_id}: launch {theirs or 'by hand'} of it still runs ({holder}); this is launch {mine or 'by hand'}"
                )
            if mine != theirs:
                flag = name if " " in name or name == "script" else f"--{name}"
                raise ConfigError(
                    f"{flag} differs between nodes of run {self._config.run_id}: {mine!r} here, {theirs!r} on {holder}; start all with the same command"
                )
