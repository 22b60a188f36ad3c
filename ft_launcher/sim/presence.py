"""How a simulated agent is part of its job: registered with a lease, a candidate for controller, an ear for the store (`shell/{join,lease,candidate,reporter,presence}.py`).

Renewals that change nothing are left out: a lease that is renewed has no end, and whatever keeps its holder from renewing it (a freeze, a cut, an
outage, its own end) gives it one. It decides nothing but what those files decide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ft_launcher.core.events import JobChanged
from ft_launcher.core.evidence import NodeInfo, NodeReport
from ft_launcher.sim.agent import Agent
from ft_launcher.sim.controller import Controller
from ft_launcher.sim.etcd import Entry, Etcd, Watch

if TYPE_CHECKING:
    from ft_launcher.sim.launch import Launch

RENEWALS = 4
HESITATE_S = 0.2
"""Nodes that hold ranks let spares go first."""
OWN_ID_S = 1.0
"""How often a joining agent looks whether its predecessor's registration has ended."""
AWAY_S = 1.0


class Presence:
    """One agent's. `controller` is set while it governs; `leased`: its registration stands."""

    def __init__(self, launch: Launch, agent: Agent, info: NodeInfo) -> None:
        self.agent = agent
        self.info = info
        self.controller: Controller | None = None
        self.lease = 0
        self.joined = False
        self.joined_at = 0.0
        self._launch = launch
        self._store: Etcd = launch.store
        self._blocked: set[str] = set()
        self._standing = False
        self._watches: list[Watch] = []
        self._sending = self._dirty = False

    def _call(self, effect: Callable[[], Any], answer: Callable[[Any], None]) -> None:
        """A call of this agent: answered in its own time, if it lives to hear it."""
        life = self.agent.life
        self._store.call(self.agent.host, self._living(effect), lambda result: life.soon(answer, result), self._give_up)

    def _living(self, effect: Callable[[], Any]) -> Callable[[], Any]:
        """What a dead agent has not sent does not happen."""
        return lambda: None if self.agent.gone else effect()

    def _give_up(self) -> None:
        self.agent.life.soon(self._launch.store_unreachable, self.agent)

    # -- joining ------------------------------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Register; while a predecessor's registration stands, wait for its end."""
        self._call(self._register_anew, self._on_joined)

    def _register_anew(self) -> int:
        key = f"nodes/{self.info.node_id}"
        if self._store.created(key):
            return 0
        self._store.delete(f"reports/{self.info.node_id}")
        return self._register()

    def _register(self) -> int:
        """The effect of registering under a new lease; 0 where the id is taken."""
        if self._store.created(f"nodes/{self.info.node_id}") or self.agent.gone:
            return 0
        lease = self._store.grant(self._launch.ttl_s)
        self._store.put(f"nodes/{self.info.node_id}", self.info, lease)
        return lease

    def _on_joined(self, lease: int) -> None:
        if not lease:
            self.agent.life.after(OWN_ID_S, self.join)
            return
        self.lease, self.joined, self.joined_at = lease, True, self.agent.life.now
        self._hold()
        host = self.agent.host
        self._watches = [self._store.watch(host, "job", self._on_job), self._store.watch(host, "leader", self._on_leader)]
        self._call(lambda: (self._store.keys.get("job"), self._store.keys.get("leader")), self._on_listed)
        self._launch.agent_joined(self.agent)

    def _on_listed(self, found: tuple[Entry | None, Entry | None]) -> None:
        job, leader = found
        self._on_job("job", job, 0)
        self._on_leader("leader", leader, 0)
        if self._dirty:
            self.report()

    def _on_job(self, key: str, entry: Entry | None, revision: int) -> None:
        if entry is not None:
            self.agent.feed(JobChanged(entry.value, entry.modified))

    # -- the lease ------------------------------------------------------------------------------------------------------------------------

    def block(self, why: str) -> None:
        """It cannot renew for now."""
        if not self._blocked and self.lease and not self._launch.alone:
            self._store.unrenewed(self.lease, self._launch.noise.uniform(0.0, self._launch.ttl_s / RENEWALS))
        self._blocked.add(why)

    def unblock(self, why: str) -> None:
        """This keeps it from renewing no more; the next renewal comes within a quarter of the lease time."""
        self._blocked.discard(why)
        if not self._blocked and self.lease:
            self.agent.life.after(self._launch.noise.uniform(0.0, self._launch.ttl_s / RENEWALS), self._renew)

    def _hold(self) -> None:
        """A fresh lease is renewed, unless something already prevents it."""
        if self._blocked and not self._launch.alone:
            self._store.unrenewed(self.lease, 0.0)

    def _renew(self) -> None:
        if not self._blocked:
            self._call(lambda: self._store.renewed(self.lease), lambda held: None if held else self._again())

    def _again(self) -> None:
        """The lease has ended: register anew under the same incarnation, unless somebody else holds the id by now."""
        self._call(lambda: (self._register(), self._store.keys.get(f"nodes/{self.info.node_id}")), self._registered)

    def _registered(self, result: tuple[int, Entry | None]) -> None:
        lease, holder = result
        if lease:
            self.lease = lease
            self._hold()
            self._launch.world.count_one(self.agent)
        elif holder is not None and holder.value.incarnation != self.info.incarnation:
            self._launch.usurped(self.agent)

    def end(self) -> None:
        """The agent leaves: its registration, and an office that it holds, vanish at once."""
        self.close()
        self._store.call(self.agent.host, self._revoke, lambda _: None)

    def _revoke(self) -> None:
        self._store.revoke(self.lease)
        self._store.delete(f"drains/{self.info.node_id}")

    def close(self) -> None:
        """The agent is gone: nobody renews, nobody listens."""
        self.block("gone")
        for watch in self._watches:
            watch.close()
        if self.controller is not None:
            self.controller.close()
            self.controller = None

    # -- the store, as felt -----------------------------------------------------------------------------------------------------------------

    def store_away(self, until: float) -> None:
        """The store is out of reach until then: calls fail, and after a while this agent knows."""
        self.block("store")
        noise, life, ttl_s = self._launch.noise, self.agent.life, self._launch.ttl_s
        now = self._launch.clock.now
        knows_at, back_at = now + AWAY_S + noise.uniform(0.0, ttl_s / RENEWALS), until + noise.uniform(0.0, 1.0)
        if knows_at < until:
            life.at(knows_at, self._feel, False)
            life.at(back_at, self._feel, True)
        self._launch.clock.at(until, self._store_back)

    def _store_back(self) -> None:
        if self._store.reach_at(self.agent.host) <= self._launch.clock.now:
            self.unblock("store")

    def _feel(self, there: bool) -> None:
        if self.controller is not None and (not there or self._store.reach_at(self.agent.host) <= self._launch.clock.now):
            self.controller.feel_store(there)

    # -- reports --------------------------------------------------------------------------------------------------------------------------

    def report(self) -> None:
        """Write the newest report as soon as the one before is written, never over another agent's."""
        self._dirty = True
        if self.joined and not self._sending:
            self._sending = True
            self.agent.life.after(0.0002, self._put)

    def _put(self) -> None:
        self._dirty = False
        report = self.agent.machine.report
        self._call(lambda: self._write(report), self._written)

    def _write(self, report: NodeReport) -> bool:
        key = f"reports/{report.node_id}"
        known = self._store.keys.get(key)
        if known is not None and known.value.incarnation != report.incarnation:
            return False
        self._store.put(key, report)
        return True

    def _written(self, ours: bool) -> None:
        self._sending = False
        if not ours:
            self._launch.usurped(self.agent)
        elif self._dirty:
            self.report()

    # -- standing for controller ----------------------------------------------------------------------------------------------------------------

    def _on_leader(self, key: str, entry: Entry | None, revision: int) -> None:
        if entry is None and self.controller is None and not self._standing:
            self._standing = True
            self.agent.life.after(0.0, self._stand)

    def _stand(self) -> None:
        """The office is vacant, as far as is known here."""
        if self._busy():
            self.agent.life.after(HESITATE_S, self._look_again)
        else:
            self._elect()

    def _busy(self) -> bool:
        job = self.agent.machine.job
        return job is not None and job.placement is not None and self.info.node_id in job.placement.nodes

    def _look_again(self) -> None:
        self._call(lambda: self._store.created("leader"), lambda created: self._stay_out() if created else self._elect())

    def _stay_out(self) -> None:
        """Somebody holds the office. A vacancy that was seen meanwhile counts."""
        self._standing = False
        self._call(lambda: self._store.keys.get("leader"), lambda entry: self._on_leader("leader", entry, 0))

    def _elect(self) -> None:
        self._call(self._take_office, self._elected)

    def _take_office(self) -> int:
        """The created revision of the office that is now ours, 0: somebody else has it, -1: our lease has ended."""
        if self._store.created("leader"):
            return 0
        if self.lease not in self._store.leases or self.agent.gone:
            return -1
        return self._store.put("leader", self.info, self.lease)

    def _elected(self, revision: int) -> None:
        if revision <= 0:
            self.agent.life.after(HESITATE_S, self._stay_out)
            return
        self.controller = self._launch.gov.appoint(self, revision)
        self.controller.begin()

    def deposed(self) -> None:
        """We govern no more."""
        self.controller = None
        self.agent.life.after(HESITATE_S, self._stay_out)

    def leader_disconnected(self) -> None:
        """The controller's connection was closed by its host: if nobody listens there any more, the office is vacant now."""
        self._call(lambda: self._store.keys.get("leader"), self._probe_leader)

    def _probe_leader(self, entry: Entry | None) -> None:
        if entry is not None and entry.value.node_id != self.info.node_id:
            self._launch.gov.reach_leader(self.agent, entry.value, lambda: self._vacate(entry.created))

    def _vacate(self, created: int) -> None:
        self._call(lambda: self._store.delete("leader") if self._store.created("leader") == created else None, lambda _: None)
