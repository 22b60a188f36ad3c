"""The fake controller's ears: a line to every agent, probes where there is doubt, and the production membership that makes of it "lost" or "kept" (`shell/liaison.py`).

Where nothing is in doubt nothing happens: no tick, no probe, no progress. It opens no real connection and judges nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from ft_launcher.core.events import JobEvent, NodeLost
from ft_launcher.core.evidence import NodeInfo
from ft_launcher.core.membership import Finding, Kept, Membership, Probe, Reply, Rules, _Member
from ft_launcher.sim.clock import Life, Ticket
from ft_launcher.sim.host import Host
from ft_launcher.sim.network import Network

TICK_S = 0.25
PROBE_S = 0.5
HELLO_S = 1.0


class Around(Protocol):
    """What the liaison touches of the world."""

    network: Network

    def host_of(self, name: str) -> Host:
        """The machine of this node."""

    def awake(self, name: str, incarnation: str) -> bool:
        """This very agent lives and is not frozen."""

    def tell_progress(self) -> None:
        """There is doubt: agents that see steps say so now."""

    def kept(self, name: str, reason: str) -> None:
        """A node without a lease is kept."""


class Doubts(Membership):
    """The production membership, which also says whether there is anything to look at again."""

    def doubtful(self) -> bool:
        """A tick could make a difference."""
        return any(_in_doubt(member) for member in self._members.values())

    def in_doubt(self, name: str) -> bool:
        """Because of this node."""
        member = self._members.get(name)
        return member is not None and _in_doubt(member)


def _in_doubt(member: _Member) -> bool:
    return member.suspect_since is not None or member.broken or bool(member.refused_by)


class Line:
    """The connection to one agent."""

    def __init__(self, liaison: Liaison, node: NodeInfo) -> None:
        self.node = node
        self.up = False
        self.tried = False
        self.closed = False
        self._liaison = liaison
        self._pause_s = 0.1
        self._dial()

    def _dial(self) -> None:
        if not self.closed:
            self._liaison.reach(self.node, HELLO_S, self._on_reply)

    def _on_reply(self, reply: Reply) -> None:
        if self.closed:
            return
        self.tried, self.up = True, reply is Reply.ANSWERED
        if not self.up:
            self._pause_s = min(2 * self._pause_s, 1.0)
            self._liaison.life.after(self._pause_s, self._dial)
        self._liaison.on_state(self.node.node_id, reply)

    def broken(self) -> None:
        """The other side's host has closed it."""
        if self.up and not self.closed:
            self.up, self._pause_s = False, 0.1
            self._liaison.life.after(self._pause_s, self._dial)
            self._liaison.on_state(self.node.node_id, None)


class Liaison:
    """All agents but our own. `offer` is the controller's queue."""

    def __init__(self, around: Around, host: Host, life: Life, rules: Rules, offer: Callable[[JobEvent], None]) -> None:
        self.life = life
        self.lines: dict[str, Line] = {}
        self._around = around
        self._host = host
        self._members = Doubts(rules)
        self._nodes: dict[str, NodeInfo] = {}
        self._offer = offer
        self._turn = 0
        self._timer: Ticket | None = None
        self._closed = False

    def registered(self, node: NodeInfo) -> None:
        """The node is in the store (again)."""
        if node.node_id == self._host.name:
            return
        known = self._nodes.get(node.node_id)
        self._nodes[node.node_id] = node
        self._act(node.node_id, self._members.joined(self.life.now, node.node_id))
        if known is None or known.incarnation != node.incarnation:
            self._hang_up(node.node_id)
            self.lines[node.node_id] = Line(self, node)

    def missing(self, node: NodeInfo) -> None:
        """It holds ranks and is not in the store."""
        self.registered(node)
        self.unregistered(node.node_id)

    def unregistered(self, name: str) -> None:
        """Its registration has vanished."""
        self._act(name, self._members.lease_gone(self.life.now, name))

    def store_there(self, there: bool) -> None:
        """The store has gone away, or is back."""
        (self._members.store_back if there else self._members.store_away)(self.life.now)

    def stepped(self, began_ago_s: float) -> None:
        """A step that was begun so long ago has been completed."""
        if math.isfinite(began_ago_s):
            self._members.stepped(self.life.now - began_ago_s)

    def close(self) -> None:
        """Hang up everywhere."""
        self._closed = True
        for name in list(self.lines):
            self._hang_up(name)
        if self._timer is not None:
            self._timer.cancel()

    # -- what comes in --------------------------------------------------------------------------------------------------------------------

    def on_state(self, name: str, reply: Reply | None) -> None:
        """A connection came up, an attempt failed, or (None) it was closed by the other side."""
        now = self.life.now
        self._act(name, self._members.disconnected(now, name) if reply is None else self._members.replied(now, name, reply))

    def on_closed(self, name: str, incarnation: str) -> None:
        """The host of an agent says that its process is gone."""
        line = self.lines.get(name)
        if line is not None and line.node.incarnation == incarnation:
            line.broken()

    def _tick(self) -> None:
        self._timer = None
        if self._closed:
            return
        self._obey(self._members.tick(self.life.now))
        if self._timer is None and not self._closed and self._members.doubtful():
            self._timer = self.life.after(TICK_S, self._tick)
        self._around.tell_progress()

    def _keep_looking(self, name: str) -> None:
        """New doubt is about the node of which something was heard."""
        if self._timer is None and not self._closed and self._members.in_doubt(name):
            self._timer = self.life.after(TICK_S, self._tick)

    # -- what goes out --------------------------------------------------------------------------------------------------------------------

    def _act(self, name: str, findings: Sequence[Finding]) -> None:
        self._obey(findings)
        self._keep_looking(name)

    def _obey(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            if isinstance(finding, Probe):
                self._probe(finding.node_id)
            elif isinstance(finding, Kept):
                self._around.kept(finding.node_id, finding.reason)
            else:
                self._hang_up(finding.node_id)
                self._nodes.pop(finding.node_id, None)
                self._offer(NodeLost(finding.node_id, finding.reason))

    def reach(self, node: NodeInfo, within_s: float, told: Callable[[Reply], None]) -> None:
        """From this host; heard in this controller's time."""
        life, asked_at = self.life, self.life.now
        target = self._around.host_of(node.node_id)

        def heard(reply: Reply) -> None:
            """Who was frozen meanwhile finds the time for the answer run out, as soon as it looks."""
            told(Reply.SILENT if life.frozen_at > asked_at and life.now - asked_at > within_s else reply)

        self._around.network.reach(self._host, target, node.incarnation, within_s, lambda reply: life.soon(heard, reply))

    def _probe(self, name: str) -> None:
        """From here and from one other agent that is connected, each time another."""
        node = self._nodes.get(name)
        if node is None:
            return
        others = [line for other, line in self.lines.items() if other != name]
        self._turn += 1
        turned = others[self._turn % len(others) :] + others[: self._turn % len(others)] if others else []
        helper = next((line for line in turned if line.up), None)
        if helper is not None:
            self._ask(helper.node, node)
        alone = helper is None and all(line.tried for line in others)
        self.reach(node, PROBE_S, lambda reply: self._on_own_reply(node, reply, alone))

    def _on_own_reply(self, node: NodeInfo, reply: Reply, alone: bool) -> None:
        self._on_reply(node, reply, "self")
        if alone and reply is Reply.REFUSED:
            self._on_reply(node, reply, "nobody else")

    def _ask(self, helper: NodeInfo, node: NodeInfo) -> None:
        """Another agent tries, too, and tells."""
        network, host = self._around.network, self._around.host_of(helper.node_id)

        def ask() -> None:
            if self._around.awake(helper.node_id, helper.incarnation):
                network.reach(host, self._around.host_of(node.node_id), node.incarnation, PROBE_S, answer)

        def answer(reply: Reply) -> None:
            network.send(host, self._host, self.life.soon, self._on_reply, node, reply, helper.node_id)

        network.send(self._host, host, ask)

    def _on_reply(self, node: NodeInfo, reply: Reply, witness: str) -> None:
        """What was learned of a former agent says nothing of its successor."""
        known = self._nodes.get(node.node_id)
        if not self._closed and known is not None and known.incarnation == node.incarnation:
            self._act(node.node_id, self._members.replied(self.life.now, node.node_id, reply, witness))

    def _hang_up(self, name: str) -> None:
        line = self.lines.pop(name, None)
        if line is not None:
            line.closed = True
