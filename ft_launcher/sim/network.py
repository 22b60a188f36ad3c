"""Who can reach whom in the fake cluster: cuts, machines that are gone, and messages that are late, lost, doubled or out of order.

A cut says nothing to either side: it is silence. Only a host that is there and has no such process refuses. Reachability is a matter of times that
are known when a cut begins; nothing in here decides what follows from it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from ft_launcher.core.membership import Reply
from ft_launcher.sim.agent import Agent
from ft_launcher.sim.clock import Clock
from ft_launcher.sim.host import Host

LATENCY_S = 0.0004
LOSS = 0.4
"""Share of messages that a lossy channel loses; as many are doubled."""


class Network:
    """All machines. `agent_of(name)` is the agent that runs on a machine now."""

    def __init__(self, clock: Clock, noise: random.Random, agent_of: Callable[[str], Agent | None]) -> None:
        self._clock = clock
        self._noise = noise
        self._agent_of = agent_of
        self._pairs: dict[frozenset[str], float] = {}

    def cut(self, a: Host, b: Host, until: float) -> None:
        """The two do not reach each other until then."""
        pair = frozenset((a.name, b.name))
        self._pairs[pair] = max(until, self._pairs.get(pair, 0.0))

    def cut_until(self, a: Host, b: Host) -> float:
        """Until when the way between the two is, or was, cut."""
        return self._pairs.get(frozenset((a.name, b.name)), 0.0)

    def open_at(self, a: Host, b: Host) -> float:
        """When these two reach each other next: now, or at the end of the cut."""
        until = max(a.isolated_until, b.isolated_until, self.cut_until(a, b)) if a is not b else 0.0
        return max(self._clock.now, until)

    def is_open(self, a: Host, b: Host) -> bool:
        """They reach each other now."""
        return self.open_at(a, b) <= self._clock.now

    def latency_s(self) -> float:
        """One way."""
        return LATENCY_S * self._noise.uniform(0.5, 4.0)

    def reach(self, a: Host, b: Host, incarnation: str, within_s: float, told: Callable[[Reply], None]) -> None:
        """Host `a` tries to reach this agent on `b`; `told` hears what became of it."""
        agent = self._agent_of(b.name)
        there = agent is not None and agent.live and agent.incarnation == incarnation
        if (
            b.silent
            or not self.is_open(a, b)
            or (b.frozen_until > self._clock.now)
            or (agent is not None and there and not agent.life.awake)
        ):
            self._clock.after(within_s, told, Reply.SILENT)
        else:
            self._clock.after(2 * self.latency_s(), told, Reply.ANSWERED if there else Reply.REFUSED)

    def send(self, a: Host, b: Host, act: Callable[..., None], *args: Any) -> None:
        """A message from `a` to `b`: late by the latency, or by the cut it meets; over a lossy channel perhaps never, twice, or after later ones."""
        now, noise = self._clock.now, self._noise
        lossy_s = max((h.lossy_s for h in (a, b) if h.lossy_until > now), default=0.0)
        if not lossy_s:
            self._clock.at(self.open_at(a, b) + self.latency_s(), act, *args)
            return
        fate = noise.random()
        for _ in range(0 if fate < LOSS else 2 if fate > 1 - LOSS else 1):
            self._clock.at(self.open_at(a, b) + self.latency_s() + lossy_s * noise.random(), act, *args)
