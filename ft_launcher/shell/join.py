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
LEASES = 10
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


class _Patience:
    """How long a registration may be that of a dead agent. A lease ends its TTL after the agent did, but a store that restarts renews it in full: so where
    the host says that nobody listens there (`over` is not enough then), it is given several times that (`exhausted`)."""

    def __init__(self, ttl_s: float) -> None:
        self._began_s = asyncio.get_running_loop().time()
        self._ttl_s = ttl_s

    @property
    def over(self) -> bool:
        """A lease time has passed."""
        return asyncio.get_running_loop().time() - self._began_s > self._ttl_s + MARGIN_S

    @property
    def exhausted(self) -> bool:
        """So have several."""
        return asyncio.get_running_loop().time() - self._began_s > LEASES * self._ttl_s + MARGIN_S


def _placed(state: JobState) -> list[Peer]:
    """The agents that were given ranks, where they listened then."""
    nodes = state.placement.nodes if state.placement is not None else ()
    return [Peer(n, state.addresses[n], state.incarnations.get(n, "")) for n in nodes if n in state.addresses]


def _next_generation(state: JobState) -> JobState:
    """A fresh job; what was found out about hardware stays known, and a rerun goes on."""
    fresh = JobState(state.run_id, state.generation + 1)
    return fresh.but(hardware=state.hardware, rerun=state.rerun, rerun_verdict=state.rerun_verdict)


def _peer(entry: Entry) -> Peer:
    node = NodeInfo.from_json(json.loads(entry.value))
    return Peer(node.node_id, node.address, node.incarnation)


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
        patience = _Patience(ttl_s)
        while True:
            await asyncio.sleep(0.1)
            now = await self._store.get(key)
            if now is None:
                return
            if now.created != entry.created or patience.exhausted:
                raise ConfigError(self._held(now))
            if patience.over and await self._reach(_peer(now)) is not Reply.REFUSED:
                raise ConfigError(self._held(now))

    def _held(self, entry: Entry) -> str:
        holder = NodeInfo.from_json(json.loads(entry.value))
        return f"--node-id {holder.node_id}: run {self._config.run_id} has a live agent of this id at {holder.address}; choose another --node-id, or another --run-id"

    async def _find_place(self) -> _Place:
        """The generation that lives, or a new one."""
        while True:
            spec, job = await self._store.get(self._keys.spec), await self._store.get(self._keys.job)
            if job is None:
                return self._new_place(JobState(self._config.run_id, 0), Created(self._keys.job, 0))
            state = JobState.from_json(json.loads(job.value))
            known = json.loads(spec.value) if spec is not None else {}
            if spec is not None and known.get("generation") != state.generation:
                continue  # one was begun between the two reads
            holder = await self._holder(state, known)
            if await self._store.get(self._keys.spec) != spec:
                continue  # another launch began while we looked whether this one lives
            if holder is None:
                return self._new_place(_next_generation(state), Modified(self._keys.job, job.modified))
            self._compare(known, holder)
            return _Place(state.generation, (Modified(self._keys.spec, spec.modified if spec is not None else 0),))

    def _new_place(self, fresh: JobState, compare: Compare) -> _Place:
        generation = fresh.generation
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
        return await self._member(state) or ("another node" if same_launch else None)

    async def _member(self, state: JobState) -> str | None:
        """A node of this generation whose agent lives, None where there is none. An answer is proof; without one, only a registration that outlasts a lease time is.

        That nobody is registered proves nothing by itself: a store that was frozen ends all leases at once. Those that hold ranks are asked, too; where their hosts do
        not all say that nobody listens there, whoever lives is given a lease time to register again.
        """
        patience, told = _Patience(self._config.node_ttl_s), False
        while True:
            registered = await self._registered(state.generation)
            peers = list(dict.fromkeys([*registered, *_placed(state)]))
            asked = random.sample(peers, min(len(peers), MOST_ASKED))
            replies = await asyncio.gather(*(self._reach(peer) for peer in asked))
            if Reply.ANSWERED in replies:
                return asked[replies.index(Reply.ANSWERED)].node_id
            refused_by_all = bool(asked) and len(asked) == len(peers) and set(replies) == {Reply.REFUSED}
            if registered and (patience.exhausted or (patience.over and Reply.SILENT in replies)):
                return registered[0].node_id
            if not registered and (refused_by_all or patience.over):
                return None
            if not told:
                self._say_whose_life_is_in_doubt(state, registered)
            told = True
            await asyncio.sleep(POLL_S)

    def _say_whose_life_is_in_doubt(self, state: JobState, registered: list[Peer]) -> None:
        who = (
            f"{registered[0].node_id} is registered but does not answer"
            if registered
            else f"generation {state.generation} has not ended and nobody of it answers"
        )
        self._say(f"run {self._config.run_id}: {who}: waiting up to {self._config.node_ttl_s + MARGIN_S:g} s to see whether it lives")

    async def _registered(self, generation: int) -> list[Peer]:
        """The controller where there is one (it is enough, and many agents ask at once), else all nodes."""
        leader = await self._store.get(self._keys.leader)
        if leader is not None:
            said = json.loads(leader.value)
            controller = Peer(said["node"], said["address"], said["incarnation"])
            if await self._reach(controller) is Reply.ANSWERED:
                return [controller]
        found = (await self._store.list(self._keys.nodes)).entries
        return [_peer(entry) for entry in found if NodeInfo.from_json(json.loads(entry.value)).generation == generation]

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
