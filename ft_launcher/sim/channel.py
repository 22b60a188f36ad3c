"""The fake store as its users feel it: what is written arrives later, in order for each key, perhaps more than once.

Every revision of the job reaches every agent; of a node's reports the newest when its agent gets to write. Registrations and reports travel on
watches of their own, so that one may overtake the other. It knows keys and delays, not what the values mean.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from ft_launcher.core.events import JobChanged, JobEvent, NodeJoined, NodeLost, ReportReceived
from ft_launcher.core.evidence import NodeInfo, NodeReport
from ft_launcher.core.state import JobState
from ft_launcher.sim.agent import Agent
from ft_launcher.sim.clock import Clock
from ft_launcher.sim.host import Host


class Channel:
    """One launch's store. `offer` is the controller's ear; `revision` counts commits; `job` is the newest committed state."""

    def __init__(self, clock: Clock, noise: random.Random, usual_s: float, offer: Callable[[JobEvent], None]) -> None:
        self.revision = 0
        self.job: JobState | None = None
        self._clock = clock
        self._noise = noise
        self._usual_s = usual_s
        self._offer = offer
        self._agents: dict[str, Agent] = {}
        self._arrives: dict[str, float] = {}
        self._reports: dict[str, NodeReport] = {}

    def delay_s(self, host: Host | None = None) -> float:
        """How long one operation takes now, for this machine or for the controller."""
        slow_s = host.store_slow_s if host is not None and self._clock.now < host.store_slow_until else 0.0
        return self._usual_s * self._noise.uniform(0.5, 2.0) + slow_s * self._noise.random()

    def _deliver(self, key: str, delay_s: float, act: Callable[..., None], *args: Any) -> None:
        """Not before anything that was sent on the same key."""
        when = max(self._arrives.get(key, 0.0), self._clock.now + delay_s)
        self._arrives[key] = when
        self._clock.at(when, act, *args)

    # -- the job key ----------------------------------------------------------------------------------------------------------------------

    def put_job(self, job: JobState) -> None:
        """A committed state goes to every agent, as its JSON form says it."""
        self.revision += 1
        self.job = JobState.from_json(json.loads(json.dumps(job.to_json())))
        for agent in self._agents.values():
            self._tell(agent, self.job, self.revision)

    def _tell(self, agent: Agent, job: JobState, revision: int) -> None:
        key = f"{agent.name} {agent.host.boots}"
        self._deliver(key, self.delay_s(agent.host), agent.feed, JobChanged(job, revision))

    def attach(self, agent: Agent) -> None:
        """An agent lists the job key and watches it from there."""
        self._agents[agent.name] = agent
        if self.job is not None:
            self._tell(agent, self.job, self.revision)

    def detach(self, agent: Agent) -> None:
        """It is gone."""
        if self._agents.get(agent.name) is agent:
            del self._agents[agent.name]

    # -- nodes and reports ------------------------------------------------------------------------------------------------------------------

    def register(self, info: NodeInfo, host: Host) -> None:
        """A node's key appears."""
        self._deliver("nodes", self.delay_s(host), self._offer, NodeJoined(info))

    def unregister(self, name: str, reason: str) -> None:
        """A node's key is gone."""
        self._deliver("nodes", self.delay_s(), self._offer, NodeLost(name, reason))

    def report(self, agent: Agent) -> None:
        """Write the newest report as soon as the one before is written."""
        agent.dirty = True
        if not agent.sending:
            agent.sending = True
            self._clock.after(0.0002, self._put_report, agent)

    def _put_report(self, agent: Agent) -> None:
        if agent.gone:
            return
        agent.dirty = False
        report = agent.machine.report
        self._deliver(f"report {agent.name}", self.delay_s(agent.host), self._arrived, agent, report)

    def _arrived(self, agent: Agent, report: NodeReport) -> None:
        self._reports[agent.name] = report
        self._offer(ReportReceived(report))
        agent.sending = False
        if agent.dirty:
            self.report(agent)

    def repeat(self) -> None:
        """The reports' watch begins anew: everything is listed again."""
        for name, report in self._reports.items():
            self._deliver(f"report {name}", self.delay_s(), self._offer, ReportReceived(report))
