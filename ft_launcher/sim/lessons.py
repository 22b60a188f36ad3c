"""The fake lessons: what the ranks took, given to the production learning, and what it concludes, published to every agent through the store.

Real agents tell every occurrence. Here a stretch in which all steps take equally long is told by its first `ENOUGH` of them: more of the same teaches nothing that a test could see. What is
learned lives in the store, so it outlasts controllers and launches; here it is one object. It judges nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable

from ft_launcher.core.actions import RecordDecision
from ft_launcher.sim.setting import Script
from ft_launcher.sim.training import LockStep
from ft_launcher.sim.watchman import Learned, fixed_limits
from monitors.learning import Learning, Sample

ENOUGH = 48


class Lessons:
    """One job's. `publish(limits)` is called when a limit has changed."""

    def __init__(self, script: Script) -> None:
        self.publish: Callable[[Learned], None] = lambda limits: None
        self._script = script
        self._learning = Learning(dict(fixed_limits(script).sections), ({}, "train.py", ()))
        self._told = {"step": 0, "checkpointing": 0}
        self._left = {"step": ENOUGH, "checkpointing": ENOUGH}
        self._factor = 1.0

    def begin_cycle(self) -> None:
        """Ranks start anew."""
        self._learning.begin_cycle(1)
        self._told = dict.fromkeys(self._told, 0)
        self._left = dict.fromkeys(self._left, ENOUGH)
        self._factor = 1.0

    def next_s(self) -> float | None:
        """When there will be more to learn of the present pace, in seconds; None: never."""
        script = self._script
        if self._left["step"]:
            return (2 if self._factor > 1.0 else 8) * script.step_s * self._factor
        round_s = script.save_every * script.step_s + script.save_s
        return round_s * self._factor if self._left["checkpointing"] and script.save_s else None

    def listen(self, step: LockStep) -> None:
        """What has been completed since the last time, at the pace of then."""
        page = step.page()
        took_s = {"step": self._script.step_s, "checkpointing": self._script.save_s}
        counts = {"step": page.steps, "checkpointing": page.saves}
        changed = False
        for section, count in counts.items():
            fresh = min(count - self._told[section], self._left[section])
            first = self._told[section]
            samples = [Sample(section, first + i, took_s[section] * self._factor) for i in range(fresh)]
            changed |= bool(samples) and self._learning.add(0, samples)
            self._told[section] += fresh
            self._left[section] -= max(0, fresh)
        if changed:
            self._publish()

    def turn(self, factor: float) -> None:
        """From now on everything takes so many times as long."""
        if factor != self._factor:
            self._factor = factor
            self._left = dict.fromkeys(self._left, ENOUGH)

    def decided(self, decision: RecordDecision) -> None:
        """A section in which a rank was ended as hung is given more time for a while."""
        found = decision.ranks.get(decision.culprit["rank"]) if decision.culprit is not None else None
        if (
            decision.cause == "hang"
            and found is not None
            and found["section"]
            and self._learning.killed(found["section"], found["since_s"])
        ):
            self._publish()

    def limits(self) -> Learned:
        """What agents are told."""
        return {name: (t.soft_s, t.hard_s, t.learned) for name, t in self._learning.timeouts().items()}

    def _publish(self) -> None:
        self.publish(self.limits())
