"""Joining a run: which generation, the same job on every node, and a node id of one's own.

A generation is one launch of a run id. An agent belongs to the generation that lives; where none does (all were killed, or it has ended) it begins the next one, and every compare
is on the store's revisions so that of many agents starting together exactly one does. What an older generation left is overwritten, never obeyed.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ft_launcher.config import Config
from ft_launcher.core.evidence import NodeInfo
from ft_launcher.core.membership import Reply
from ft_launcher.core.state import JobState, Outcome, Phase
from ft_launcher.errors import ConfigError
from ft_launcher.shell.channel import Peer
from ft_launcher.shell.keys import Keys
from ft_launcher.shell.store import Compare, Created, Delete, Entry, Modified, Operation, Put, Store

Say = Callable[[str], None]
MARGIN_S = 1.0
POLL_S = 0.25
NO_GENERATION = -1
MOST_ASKED = 8
"""So many registered agents are asked at a time whether they live."""


@dataclass(frozen=True, slots=True)
class Joined:
    """This agent is part of a generation: registered under its node id, bound to a lease."""

    generation: int
    lease: int


@dataclass(frozen=True, slots=True)
class _Place:
    """A generation to join, as long as what was found holds; `begin` makes it where it is new."""

    generation: int
    while_: tuple[Compare, ...]
    begin: tuple[Put, ...] = ()


class FinishedError(Exception):
    """The run has finished already; `code` is what a late agent ends with."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


async def _nobody(peer: Peer) -> Reply:
    return Reply.SILENT


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
        self._reach: Callable[[Peer], Awaitable[Reply]] = _nobody
        self._meant = NO_GENERATION

    async def join(self, info: Callable[[int], NodeInfo], reach: Callable[[Peer], Awaitable[Reply]]) -> Joined:
        """Register `info(generation)`. Raises ConfigError (another job, or the node id is in use), FinishedError, PlatformError (the store).

        `reach` tells whether an agent is there. A generation is begun, or found still to be the newest, in the transaction that registers: it never is without a member.
        """
        self._reach = reach
        await self._look_first()
        key = self._keys.node(self._config.node_id)
        while True:
            await self._wait_for_own_id()
            place = await self._find_place()
            lease = await self._store.grant(self._config.node_ttl_s)
            own: list[Operation] = [
                Put(key, json.dumps(info(place.generation).to_json()), lease),
                Delete(self._keys.report(self._config.node_id)),
            ]
            if (await self._store.transact([Created(key, 0), *place.while_], [*place.begin, *own])).succeeded:
                return Joined(place.generation, lease)
            await self._store.revoke(lease)

    async def secret(self) -> str:
        """What opens the channel between the agents of this run; made by the first of them."""
        key = self._keys.secret
        await self._store.transact([Created(key, 0)], [Put(key, secrets.token_hex(16))])
        entry = await self._store.get(key)
        if entry is None:
            return await self.secret()
        return entry.value

    async def _look_first(self) -> None:
        """Note what this agent means to join: a generation that runs now, or was left by a predecessor of this node that died within it, may end before it gets there."""
        job, own = await self._store.get(self._keys.job), await self._store.get(self._keys.node(self._config.node_id))
        if job is not None:
            state = JobState.from_json(json.loads(job.value))
            self._meant = state.generation if state.phase is not Phase.DONE or own is not None else NO_GENERATION

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

    async def _find_place(self) -> _Place:
        """The generation that lives, or a new one."""
        while True:
            spec, job = await self._store.get(self._keys.spec), await self._store.get(self._keys.job)
            if job is None:
                return self._new_place(0, Created(self._keys.job, 0))
            state = JobState.from_json(json.loads(job.value))
            known = json.loads(spec.value) if spec is not None else {}
            if spec is not None and known.get("generation") != state.generation:
                continue  # one was begun between the two reads
            holder = await self._holder(state, known)
            if await self._store.get(self._keys.spec) != spec:
                continue  # another launch began while we looked whether this one lives
            if holder is None:
                return self._new_place(state.generation + 1, Modified(self._keys.job, job.modified))
            self._compare(known, holder)
            return _Place(state.generation, (Modified(self._keys.spec, spec.modified if spec is not None else 0),))

    def _new_place(self, generation: int, compare: Compare) -> _Place:
        fresh = JobState(self._config.run_id, generation)
        puts = (
            Put(self._keys.job, json.dumps(fresh.to_json())),
            Put(self._keys.spec, json.dumps({**self._spec, "generation": generation})),
        )
        return _Place(generation, (compare,), puts)

    async def _holder(self, state: JobState, known: Mapping[str, Any]) -> str | None:
        """A node of the stored generation that lives, None where it has ended. Raises where this agent must not be here at all."""
        same_launch = bool(self._spec["launch"]) and known.get("launch") == self._spec["launch"]
        if state.phase is Phase.DONE:
            await self._refuse_late(state, same_launch)
            return None
        return await self._member(state.generation) or ("another node" if same_launch else None)

    async def _member(self, generation: int) -> str | None:
        """A node whose agent lives, None where there is none. An answer is proof; without one, only a registration that outlasts a lease time is."""
        ttl_s, told = self._config.node_ttl_s, False
        for _ in range(int((ttl_s + MARGIN_S) / POLL_S)):
            peers = await self._registered(generation)
            if not peers:
                return None
            some = random.sample(peers, min(len(peers), MOST_ASKED))
            replies = await asyncio.gather(*(self._reach(peer) for peer in some))
            answered = [peer.node_id for peer, reply in zip(some, replies, strict=True) if reply is Reply.ANSWERED]
            if answered:
                return answered[0]
            if not told:
                self._say(
                    f"run {self._config.run_id}: {peers[0].node_id} is registered but does not answer: waiting up to {ttl_s + MARGIN_S:g} s to see whether it lives"
                )
            told = True
            await asyncio.sleep(POLL_S)
        left = await self._registered(generation)
        return left[0].node_id if left else None

    async def _registered(self, generation: int) -> list[Peer]:
        """The controller where there is one (it is enough, and many agents ask at once), else all nodes."""
        leader = await self._store.get(self._keys.leader)
        if leader is not None:
            said = json.loads(leader.value)
            controller = Peer(said["node"], said["address"], said["incarnation"])
            if await self._reach(controller) is Reply.ANSWERED:
                return [controller]
        nodes = [NodeInfo.from_json(json.loads(entry.value)) for entry in (await self._store.list(self._keys.nodes)).entries]
        return [Peer(node.node_id, node.address, node.incarnation) for node in nodes if node.generation == generation]

    async def _refuse_late(self, state: JobState, same_launch: bool) -> None:
        """The generation is over: late agents of it learn so; anybody who was there before means to run it again."""
        was_there = await self._store.get(self._keys.report(self._config.node_id)) is not None
        verdict = state.verdict
        finished = verdict is not None and verdict.outcome is Outcome.FINISHED
        late = finished and (not was_there or self._meant == state.generation)
        if same_launch or (late and not self._spec["launch"]):
            said = f"{verdict.outcome.value}: {verdict.reason}" if verdict is not None else "ended"
            code = verdict.exit_code if verdict is not None and state.placement is None else 0
            raise FinishedError(f"run {self._config.run_id} has ended already ({said}); nothing to do here", code)

    def _compare(self, known: Mapping[str, Any], holder: str) -> None:
        """Refuse to take part in a different job; both values are named."""
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
