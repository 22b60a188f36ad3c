"""How this agent is part of its job: alone over the embedded store, or one of many over a shared one.

Both give the same four things: a store, a generation, an address, and somebody who becomes the controller. `Alone` needs no lease, no channel and no election, for nobody else can
ever be there; `Shared` has all three. What runs on the node is the agent's; what is decided is the machines'.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from ft_launcher.config import Config
from ft_launcher.core.events import ProgressSeen
from ft_launcher.core.evidence import NodeInfo
from ft_launcher.core.membership import Rules
from ft_launcher.errors import ConfigError, PlatformError, ReplacedError
from ft_launcher.shell.candidate import Candidate, Office
from ft_launcher.shell.channel import Body, ChannelServer, Identity, Peer, join_address, reach
from ft_launcher.shell.controller import Controller, Neighbours
from ft_launcher.shell.join import Joiner, spec_of
from ft_launcher.shell.keys import Keys
from ft_launcher.shell.lease import Registration
from ft_launcher.shell.liaison import PROBE_S, Liaison, Outward
from ft_launcher.shell.store import MemoryStore, Store
from monitors.learning import Sample

if TYPE_CHECKING:
    from ft_launcher.shell.etcd import EtcdStore

LOCAL_HOST = "127.0.0.1"
Say = Callable[..., None]
"""`say(text)` or `say(text, level)`."""
MakeController = Callable[[str, Callable[[Controller], Neighbours] | None], Controller]


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the presence tells the agent, and asks: `busy()`, whether this node holds ranks; `training()`, whether they run unharmed; `lost(error)` ends the agent;
    `look(cycle, seconds)`: some rank elsewhere has stood still for so long."""

    on_deadline: Callable[[float], None]
    busy: Callable[[], bool]
    training: Callable[[], bool]
    lost: Callable[[BaseException], None]
    look: Callable[[int, float], None]


class Presence(Protocol):
    """See the module."""

    store: Store
    keys: Keys
    generation: int
    host: str
    listen_on: str
    incarnation: str

    async def govern(self, make: MakeController, hooks: Hooks) -> None:
        """Take part in deciding until cancelled, or until the job is done under our own control."""

    def progress(self, seen: ProgressSeen) -> None:
        """Tell the controller, wherever it is."""

    def samples(self, cycle: int, samples: list[Sample]) -> None:
        """Tell the controller how long this node's ranks took."""

    def suspicion(self, cycle: int, since_s: float) -> None:
        """Tell the controller that a rank here has stood still for so long: the other nodes are to look at theirs."""

    def in_touch(self) -> bool:
        """Whether the job is known to go on, without the store."""

    def away(self) -> bool:
        """Whether the store is known not to answer."""

    async def leave(self) -> None:
        """Give everything back."""


class Alone:
    """One node: the embedded store. `generation` is the run folder's."""

    def __init__(self, config: Config, generation: int, devices: tuple[str, ...] = ()) -> None:
        self.store: Store = MemoryStore()
        self.keys = Keys(config.run_id)
        self.generation = generation
        self.host = (config.node_addr or LOCAL_HOST).partition(":")[0] or LOCAL_HOST
        self.listen_on = self.host
        self.incarnation = ""
        self._info = node_info(config, self.host, generation, "", devices)
        self._controller: Controller | None = None

    async def govern(self, make: MakeController, hooks: Hooks) -> None:
        """A registration without a lease: it lives and dies with this process."""
        await self.store.put(self.keys.node(self._info.node_id), json.dumps(self._info.to_json()))
        self._controller = make(self._info.node_id, None)
        try:
            await self._controller.run(lease=0)
        finally:
            await self._controller.close()

    def progress(self, seen: ProgressSeen) -> None:
        """See Presence."""
        if self._controller is not None:
            self._controller.offer(seen)

    def samples(self, cycle: int, samples: list[Sample]) -> None:
        """See Presence."""
        if self._controller is not None:
            self._controller.learn(self._info.node_id, cycle, samples)

    def suspicion(self, cycle: int, since_s: float) -> None:
        """See Presence. There are no other nodes."""

    def in_touch(self) -> bool:
        """See Presence. This store is never away."""
        return False

    def away(self) -> bool:
        """See Presence."""
        return False

    async def leave(self) -> None:
        """See Presence."""
        await self.store.close()


class Shared:
    """Many nodes: etcd. Use `await Shared.enter(...)`."""

    def __init__(self, config: Config, store: EtcdStore, say: Say, devices: tuple[str, ...] = ()) -> None:
        self.store: Store = store
        self._etcd = store
        self.keys = Keys(config.run_id)
        self.generation = 0
        self.host = ""
        self.listen_on = ""
        self.incarnation = secrets.token_hex(6)
        self._config = config
        self._devices = devices
        self._say = say
        self._server: ChannelServer | None = None
        self._identity = Identity(config.node_id, self.incarnation, "")
        self._registration: Registration | None = None
        self._candidate: Candidate | None = None
        self._liaison: Liaison | None = None
        self._lease = 0
        self._address = ""
        self._look: Callable[[int, float], None] = lambda cycle, since_s: None
        store.health.listen(self._on_store)
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def enter(cls, config: Config, environ: Mapping[str, str], say: Say, devices: tuple[str, ...] = ()) -> Shared:
        """Reach the store, listen, join. Raises ConfigError, FinishedError, PlatformError (69: the store does not answer)."""
        from ft_launcher.shell.etcd import EtcdStore  # gRPC costs memory and time that one node alone need not spend

        self = cls(config, EtcdStore(config.store, registers=Keys(config.run_id).registers), say, devices)
        try:
            await self._enter(environ)
        except BaseException:
            await self.leave()
            raise
        return self

    async def _enter(self, environ: Mapping[str, str]) -> None:
        wanted, port = _wanted_address(self._config.node_addr)
        self.host = wanted or _own_address(self._config.store.endpoints)
        _check_resolves(self.host, given=wanted is not None)
        joiner = Joiner(self.store, self.keys, self._config, spec_of(self._config, environ), self._say)
        self._identity = replace(self._identity, secret=await joiner.secret())
        self._server = ChannelServer(self._identity, self._on_request)
        try:
            self._address = join_address(self.host, await self._server.listen(port))
        except OSError as error:
            raise ConfigError(
                f"--node-addr {self._config.node_addr}: cannot listen there ({error.strerror or error}); choose another port"
            ) from None
        joined = await joiner.join(self._info, lambda peer: reach(peer, self._identity))
        self.generation, self._lease = joined.generation, joined.lease

    def _info(self, generation: int) -> NodeInfo:
        return node_info(self._config, self._address, generation, self.incarnation, self._devices)

    async def govern(self, make: MakeController, hooks: Hooks) -> None:
        """Keep the lease, stand for controller, and notice when the controller's process is gone."""
        registration = Registration(self.store, self.keys, self._info(self.generation), self._config.node_ttl_s)
        registration.on_deadline = hooks.on_deadline
        registration.on_usurped = lambda why: hooks.lost(ReplacedError(why))
        self._registration = registration
        self._look = hooks.look
        office = Office(self.store, self.keys, self._identity)
        patient: Callable[[], bool] = lambda: hooks.training() or self.in_touch()  # noqa: E731 - a method would need the hooks kept
        candidate = Candidate(office, lambda: make(self._leader_value(), self._neighbours), hooks.busy, patient)
        self._candidate = candidate
        if self._server is not None:
            self._server.controller_gone = lambda: self._spawn(candidate)
        keeping = asyncio.create_task(registration.keep(self._lease))
        keeping.add_done_callback(lambda task: _on_keeping_done(task, hooks))
        self._tasks.add(keeping)
        try:
            await candidate.run(registration)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    def _spawn(self, candidate: Candidate) -> None:
        task = asyncio.create_task(candidate.leader_disconnected())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _leader_value(self) -> str:
        return json.dumps({"node": self._config.node_id, "address": self._address, "incarnation": self.incarnation})

    def _neighbours(self, controller: Controller) -> Liaison:
        self._liaison = Liaison(
            self._identity, Rules(self._config.node_ttl_s), Outward(controller.offer, controller.warn, controller.learn, self._spread)
        )
        return self._liaison

    def _on_store(self, there: bool) -> None:
        """The store has gone away, or is back: people are told, and the liaison of the day."""
        if self._registration is not None:  # before that, whoever joins waits for it and says so
            said = "answers again" if there else "does not answer; training goes on without it"
            self._say(f"the store {said}", "info" if there else "warning")
        if self._liaison is not None:
            self._liaison.store_there(there)

    def in_touch(self) -> bool:
        """See Presence. A controller is connected to us, or we are the controller of a job that runs."""
        controller = self._candidate.controller if self._candidate is not None else None
        return controller.training if controller is not None else self._server is not None and self._server.connected

    def away(self) -> bool:
        """See Presence."""
        return self._etcd.health.away

    def progress(self, seen: ProgressSeen) -> None:
        """To our own controller, or down the channel to the one elsewhere."""
        controller = self._candidate.controller if self._candidate is not None else None
        if controller is not None:
            controller.offer(seen)
        elif self._server is not None:
            ago_s = seen.began_ago_s if math.isfinite(seen.began_ago_s) else None
            self._server.tell({"progress": [seen.cycle, seen.iteration, seen.min_steps, ago_s, seen.busy]})

    def samples(self, cycle: int, samples: list[Sample]) -> None:
        """See Presence. Lost ones are no loss."""
        controller = self._candidate.controller if self._candidate is not None else None
        if controller is not None:
            controller.learn(self._config.node_id, cycle, samples)
        elif self._server is not None:
            self._server.tell({"samples": [[s.section, s.index, round(s.duration_s, 6)] for s in samples], "cycle": cycle})

    def suspicion(self, cycle: int, since_s: float) -> None:
        """See Presence."""
        if self._candidate is not None and self._candidate.controller is not None:
            self._spread(self._config.node_id, cycle, since_s)
        elif self._server is not None:
            self._server.tell({"suspect": [cycle, round(since_s, 3)]})

    def _spread(self, node_id: str, cycle: int, since_s: float) -> None:
        """As the controller: all nodes but the one that suspects look at their ranks."""
        if self._liaison is not None and self._liaison.have_looked(node_id, cycle, since_s) and node_id != self._config.node_id:
            self._look(cycle, since_s)

    def _on_request(self, body: Body, answer: Callable[[Body], None]) -> None:
        """The controller asks whether we can reach somebody, or what our ranks do."""
        with suppress(KeyError, TypeError, ValueError):
            if "look" in body:
                self._look(int(body["look"][0]), float(body["look"][1]))
        if {"reach", "address", "incarnation"} <= body.keys():
            peer = Peer(str(body["reach"]), str(body["address"]), str(body["incarnation"]))
            task = asyncio.create_task(self._reach_for(peer, answer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _reach_for(self, peer: Peer, answer: Callable[[Body], None]) -> None:
        reply = await reach(peer, self._identity, PROBE_S)
        answer({"reached": peer.node_id, "incarnation": peer.incarnation, "reply": reply.value})

    async def leave(self) -> None:
        """See Presence."""
        for task in list(self._tasks):
            task.cancel()
        if self._registration is None and self._lease:
            self._registration = Registration(self.store, self.keys, self._info(self.generation), self._config.node_ttl_s)
            self._registration.lease = self._lease
        there = not self.away()
        if self._registration is not None and there:
            there = await self._registration.end()
        if self._server is not None:
            await self._server.close()
        with suppress(PlatformError):
            await self._etcd.close(tidy=there)


def _on_keeping_done(task: asyncio.Task[None], hooks: Hooks) -> None:
    """A node whose lease nobody keeps any more must not go on in silence."""
    if not task.cancelled() and (error := task.exception()) is not None:
        hooks.lost(error)


def node_info(config: Config, address: str, generation: int, incarnation: str, devices: tuple[str, ...] = ()) -> NodeInfo:
    """This node as the others see it."""
    return NodeInfo(config.node_id, address, config.nproc, generation, config.node_order, dict(config.node_labels), devices, incarnation)


def _wanted_address(given: str | None) -> tuple[str | None, int]:
    """`--node-addr HOST[:PORT]` in its parts; port 0 lets the kernel choose."""
    if given is None:
        return None, 0
    if given.startswith("["):
        host, _, port = given[1:].partition("]")
        return host, int(port.lstrip(":") or 0)
    host, colon, port = given.rpartition(":")
    return (host, int(port)) if colon and ":" not in host else (given, 0)


def _own_address(endpoints: tuple[tuple[str, int], ...]) -> str:
    """The address of the interface that leads to the store: what other nodes can reach, wherever there are several. Loopback only when the store is there, too."""
    for host, port in endpoints:
        with suppress(OSError):
            family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
    raise ConfigError(f"no route to the store at {endpoints[0][0]}:{endpoints[0][1]}: give this node's own address with --node-addr")


def _check_resolves(host: str, given: bool) -> None:
    """A name that others cannot resolve must be said, not replaced by localhost."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        flag = "--node-addr" if given else "this node's address"
        raise ConfigError(
            f"{flag} {host}: does not resolve ({error.strerror or error}); give an address that the other nodes can reach"
        ) from None
