"""The controller's ears: one connection to each agent, probes where there is doubt, and what membership makes of it.

Everything here feeds `core/membership.py`, which alone says "lost" or "kept". Progress of other nodes arrives here, too. It owns connections and timers of the controller and nothing
else; it goes when the controller goes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ft_launcher.core.events import JobEvent, NodeLost, ProgressSeen
from ft_launcher.core.evidence import NodeInfo
from ft_launcher.core.membership import Finding, Kept, Lost, Membership, Probe, Reply, Rules
from ft_launcher.shell.channel import Body, Identity, Line, Peer, reach
from ft_launcher.shell.limits import samples_in
from monitors.learning import Sample

TICK_S = 0.25
PROBE_S = 0.5
LOOK_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Outward:
    """What the liaison tells: events to the job machine, lines to people, samples (node, cycle, samples) to whoever learns from them, and (node, cycle, seconds) of a rank there
    that has stood still so long.
    """

    offer: Callable[[JobEvent], None]
    say: Callable[[str], None]
    learn: Callable[[str, int, list[Sample]], None]
    suspicion: Callable[[str, int, float], None] = lambda node_id, cycle, since_s: None


class Liaison:
    """All agents but our own (`identity.node_id`), as long as we are the controller."""

    def __init__(self, identity: Identity, rules: Rules, outward: Outward) -> None:
        self._identity = identity
        self._outward = outward
        self._members = Membership(rules)
        self._nodes: dict[str, NodeInfo] = {}
        self._lines: dict[str, Line] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = 0
        self._looked_at = -LOOK_EVERY_S
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def registered(self, node: NodeInfo) -> None:
        """The node is in the store (again)."""
        if node.node_id == self._identity.node_id:
            return
        known = self._nodes.get(node.node_id)
        self._nodes[node.node_id] = node
        if known is not None and known.incarnation != node.incarnation:
            self._members.left(node.node_id)  # what was seen of the former agent says nothing of this one
        self._act(self._members.joined(self._now(), node.node_id))
        if known is None or (known.address, known.incarnation) != (node.address, node.incarnation):
            self._hang_up(node.node_id)
            self._lines[node.node_id] = Line(_peer(node), self._identity, self._on_body, self._on_state)

    def missing(self, node: NodeInfo) -> None:
        """The node holds ranks but is not in the store: a controller that takes over has to find out whether it is still there."""
        self.registered(node)
        self.unregistered(node.node_id)

    def unregistered(self, node_id: str) -> None:
        """Its registration has vanished."""
        self._act(self._members.lease_gone(self._now(), node_id))

    def left(self, node_id: str) -> None:
        """It was asked to go and has gone: nobody to probe."""
        self._members.left(node_id)
        self._hang_up(node_id)
        self._nodes.pop(node_id, None)

    def store_there(self, there: bool) -> None:
        """The store has gone away, or is back."""
        if there:
            self._members.store_back(self._now())
        else:
            self._members.store_away(self._now())

    def stepped(self, began_ago_s: float) -> None:
        """A rank has completed a step that it began so long ago."""
        if math.isfinite(began_ago_s):
            self._members.stepped(self._now() - began_ago_s)

    def have_looked(self, node_id: str, cycle: int, since_s: float) -> bool:
        """Have all agents but this one look at what their ranks do. False when that was done a moment ago: when a job of a thousand nodes stands still, each of them says so."""
        now = self._now()
        if now - self._looked_at < LOOK_EVERY_S:
            return False
        self._looked_at = now
        for other, line in self._lines.items():
            if other != node_id:
                line.send({"look": [cycle, round(since_s, 3)]})
        return True

    async def close(self) -> None:
        """Hang up everywhere."""
        self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        lines, self._lines = list(self._lines.values()), {}
        await asyncio.gather(*self._tasks, *(line.close() for line in lines), return_exceptions=True)

    # -- what comes in ----------------------------------------------------------------------------------------------------------------------

    def _on_state(self, node_id: str, reply: Reply | None) -> None:
        """A connection came up, an attempt failed, or (None) it was closed by the other side."""
        if reply is None:
            self._act(self._members.disconnected(self._now(), node_id))
        else:
            self._act(self._members.replied(self._now(), node_id, reply))

    def _on_body(self, node_id: str, body: Body) -> None:
        """Progress, or the answer to a probe that we asked this agent to make. What is malformed is ignored."""
        with suppress(KeyError, TypeError, ValueError):
            if "progress" in body:
                cycle, iteration, min_steps, began_ago_s, busy = body["progress"]
                ago_s = math.inf if began_ago_s is None else float(began_ago_s)
                self.stepped(ago_s)
                self._outward.offer(ProgressSeen(node_id, int(cycle), iteration, int(min_steps), ago_s, bool(busy)))
            elif "samples" in body:
                self._outward.learn(node_id, int(body["cycle"]), samples_in(body["samples"]))
            elif "suspect" in body:
                self._outward.suspicion(node_id, int(body["suspect"][0]), float(body["suspect"][1]))
            elif "reached" in body:
                self._on_reply(str(body["reached"]), str(body["incarnation"]), Reply(body["reply"]), witness=node_id)

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        self._act(self._members.tick(self._now()))

    # -- what goes out ------------------------------------------------------------------------------------------------------------------------

    def _act(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            if isinstance(finding, Probe):
                self._probe(finding.node_id)
            elif isinstance(finding, Kept):
                self._outward.say(f"node {finding.node_id}: {finding.reason}")
            else:
                self._lose(finding)

    def _lose(self, finding: Lost) -> None:
        self._hang_up(finding.node_id)
        self._nodes.pop(finding.node_id, None)
        self._outward.offer(NodeLost(finding.node_id, finding.reason))

    def _probe(self, node_id: str) -> None:
        """From here, and from one other agent that is connected, each time another; where all others are out of reach, what we see has to do."""
        node = self._nodes.get(node_id)
        if node is None:
            return
        others = [line for other, line in self._lines.items() if other != node_id]
        self._turn += 1
        turned = others[self._turn % len(others) :] + others[: self._turn % len(others)] if others else []
        asked = any(line.send({"reach": node_id, "address": node.address, "incarnation": node.incarnation}) for line in turned)
        task = asyncio.create_task(self._reach(node, alone=not asked and all(line.tried for line in others)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reach(self, node: NodeInfo, alone: bool) -> None:
        reply = await reach(_peer(node), self._identity, PROBE_S)
        self._on_reply(node.node_id, node.incarnation, reply, witness="self")
        if alone and reply is Reply.REFUSED:
            self._on_reply(node.node_id, node.incarnation, reply, witness="nobody else")

    def _on_reply(self, node_id: str, incarnation: str, reply: Reply, witness: str) -> None:
        """What was learned of a former agent says nothing of its successor."""
        node = self._nodes.get(node_id)
        if node is not None and node.incarnation == incarnation:
            self._act(self._members.replied(self._now(), node_id, reply, witness))

    def _hang_up(self, node_id: str) -> None:
        line = self._lines.pop(node_id, None)
        if line is not None:
            line.hang_up()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _peer(node: NodeInfo) -> Peer:
    return Peer(node.node_id, node.address, node.incarnation)
