"""Who is still there: from leases, connections, probes and progress to "lost" or "kept" (docs/design.md section 6).

A lost node that is not noticed stops a job of millions; a healthy one declared lost throws away its work. So a single sign is never enough unless it is proof: a closed connection
*and* a refused new one mean that the agent process is gone; a missing lease alone means only that the store has not heard from it. It knows times of one clock, the controller's,
and what was seen; it never opens a connection and never compares clocks of two machines.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class Reply(StrEnum):
    """What became of an attempt to reach a node's agent."""

    ANSWERED = "answered"
    REFUSED = "refused"
    """The host answers that nobody listens there: the agent process is gone."""
    SILENT = "silent"
    """No answer within the attempt's time: the host may be gone, frozen or cut off."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Seconds. `ttl_s` is the nodes' lease time; a silent node is lost after `silent_s` without progress, and after `patience` TTLs whatever progresses."""

    ttl_s: float
    silent_s: float = 1.0
    patience: int = 10
    probe_every_s: float = 0.5


@dataclass(frozen=True, slots=True)
class Probe:
    """Try to reach this node, from here and from one other agent."""

    node_id: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The node is gone; the reason is one sentence with numbers."""

    node_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Kept:
    """The node has no lease and is kept all the same; said once a suspicion."""

    node_id: str
    reason: str


Finding = Probe | Lost | Kept


@dataclass(slots=True)
class _Member:
    leased: bool = True
    broken: bool = False
    met: bool = False
    refused_by: set[str] = field(default_factory=set)
    suspect_since: float | None = None
    quiet_since: float | None = None
    asked_at: float | None = None
    answered_at: float | None = None
    told: set[str] = field(default_factory=set)


class Membership:
    """The controller's view of the registered nodes. Every method takes the controller's monotonic time in seconds and returns findings, in order."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._members: dict[str, _Member] = {}
        self._store_away_since: float | None = None
        self._step_began_at: float | None = None

    def joined(self, now: float, node_id: str) -> list[Finding]:
        """The node is registered and has a lease (again)."""
        known = self._members.get(node_id)
        fresh = _Member() if known is None else _Member(broken=known.broken, met=known.met)
        self._members[node_id] = fresh
        return [Probe(node_id)] if fresh.broken else []

    def left(self, node_id: str) -> None:
        """The node is not watched any more: declared lost, or drained."""
        self._members.pop(node_id, None)

    def lease_gone(self, now: float, node_id: str) -> list[Finding]:
        """The node's registration has vanished from the store: a suspicion, nothing more."""
        member = self._members.get(node_id)
        if member is None or not member.leased:
            return []
        member.leased = False
        member.suspect_since = now
        member.quiet_since = None  # what was silence while it had a lease is none to count
        return self._ask(now, node_id, member)

    def store_away(self, now: float) -> None:
        """The store does not answer: nothing it says or does not say counts until it is back."""
        if self._store_away_since is None:
            self._store_away_since = now

    def store_back(self, now: float) -> None:
        """The store answers again. Suspicions start anew: the agents need a moment to renew their leases, too."""
        self._store_away_since = None
        for member in self._members.values():
            if member.suspect_since is not None:
                member.suspect_since = now
                member.quiet_since = None

    def disconnected(self, now: float, node_id: str) -> list[Finding]:
        """The controller's connection to the agent was closed by its host. Proof only together with a refused new one."""
        member = self._members.get(node_id)
        if member is None:
            return []
        member.broken = True
        return self._ask(now, node_id, member)

    def stepped(self, began_at: float) -> None:
        """A rank somewhere has completed a step that it began at this time: then every rank of its collectives was alive in between."""
        if self._step_began_at is None or began_at > self._step_began_at:
            self._step_began_at = began_at

    def replied(self, now: float, node_id: str, reply: Reply, witness: str = "self") -> list[Finding]:
        """What an attempt to reach the node gave; any answer outweighs all silence. `witness`: who tried, this controller or another agent for it."""
        member = self._members.get(node_id)
        if member is None:
            return []
        if reply is Reply.ANSWERED:
            return self._answered(now, node_id, member)
        if reply is Reply.REFUSED:
            return self._refused(now, node_id, member, witness)
        if member.quiet_since is None:
            member.quiet_since = member.asked_at if member.asked_at is not None else now
        return self._weigh(now, node_id, member)

    def tick(self, now: float) -> list[Finding]:
        """Time passes: probe again what is in doubt, and weigh it."""
        findings: list[Finding] = []
        for node_id, member in list(self._members.items()):
            if member.suspect_since is not None or member.broken:
                findings += self._weigh(now, node_id, member)
            if node_id in self._members and self._due(now, member):
                findings += self._ask(now, node_id, member)
        return findings

    def suspects(self) -> Iterable[str]:
        """The nodes in doubt now."""
        return [n for n, m in self._members.items() if m.suspect_since is not None or m.broken]

    # -- judgement ------------------------------------------------------------------------------------------------------------------------

    def _refused(self, now: float, node_id: str, member: _Member, witness: str) -> list[Finding]:
        """Nobody listens there. Proof, unless this controller has never reached the node and it has a lease: then a firewall could say the same to us alone."""
        if member.broken or not member.leased:
            why = "its connection closed and" if member.broken else "its lease ended and"
            return self._lose(node_id, f"{why} its address refuses a new one: the agent process is gone")
        if member.met:
            return []
        first = not member.refused_by
        member.refused_by.add(witness)
        if len(member.refused_by) > 1:
            return self._lose(node_id, "it is registered, but its address refuses connections from two nodes: the agent process is gone")
        return self._ask(now, node_id, member) if first else []

    def _answered(self, now: float, node_id: str, member: _Member) -> list[Finding]:
        member.broken, member.met = False, True
        member.refused_by.clear()
        member.quiet_since, member.asked_at, member.answered_at = None, now, now
        if member.suspect_since is None:
            return []
        if now - member.suspect_since < self.rules.silent_s:
            return []  # it may be about to leave: its lease is the first that it gives up
        if self._all_suspect():
            return self._once(node_id, member, "all", "all leases ended at once and it answers: the store is in trouble, not the nodes")
        return self._once(
            node_id,
            member,
            "cut",
            f"its lease ended {now - member.suspect_since:.1f} s ago but it answers: it is cut off from the store only",
        )

    def _weigh(self, now: float, node_id: str, member: _Member) -> list[Finding]:
        """Silence: how long, and does training go on?"""
        if member.quiet_since is None or self._store_away_since is not None:
            return []
        if member.leased:
            return []  # the store hears from it: whatever is wrong is between it and us
        quiet_s = now - member.quiet_since
        since = member.suspect_since if member.suspect_since is not None else member.quiet_since
        limit_s = self.rules.patience * self.rules.ttl_s
        unheard_s = now - max(since, member.answered_at if member.answered_at is not None else since)
        if unheard_s > limit_s:
            return self._lose(node_id, f"no lease and no answer for {unheard_s:.1f} s ({self.rules.patience} x TTL {self.rules.ttl_s:g} s)")
        if quiet_s < self.rules.silent_s:
            return []
        if self._step_began_at is not None and self._step_began_at > since:
            return self._once(node_id, member, "steps", "no lease and no answer, but steps begun after its lease ended are completed: kept")
        if self._all_suspect() and len(self._members) > 2:
            return self._once(
                node_id, member, "alone", "no node has a lease or answers: this controller may be the one that is cut off; held"
            )
        return self._lose(
            node_id,
            f"its lease ended {now - since:.1f} s ago, it does not answer for {quiet_s:.1f} s and no step was begun and completed since",
        )

    def _all_suspect(self) -> bool:
        return len(self._members) > 1 and all(not m.leased for m in self._members.values())

    def _due(self, now: float, member: _Member) -> bool:
        doubtful = member.suspect_since is not None or member.broken or bool(member.refused_by)
        return doubtful and (member.asked_at is None or now - member.asked_at >= self.rules.probe_every_s)

    def _ask(self, now: float, node_id: str, member: _Member) -> list[Finding]:
        member.asked_at = now
        return [Probe(node_id)]

    def _once(self, node_id: str, member: _Member, key: str, reason: str) -> list[Finding]:
        if key in member.told:
            return []
        member.told.add(key)
        return [Kept(node_id, reason)]

    def _lose(self, node_id: str, reason: str) -> list[Finding]:
        del self._members[node_id]
        return [Lost(node_id, reason)]
