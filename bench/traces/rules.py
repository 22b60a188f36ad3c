"""The contestants of `bench/timeouts.py`: our rule, NVRx's as it is described and as it polls, and simpler rules that were considered (docs/adr/0004-timeout-rule.md).

A contestant says the limit now, learns a duration, is told of restarts, and says when it would notice that a limit has passed.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Protocol

from monitors.timeouts import TimeoutLearner


class Contestant(Protocol):
    """One rule on one section."""

    poll_s: float

    def limit_s(self) -> float:
        """The hard limit now, in seconds."""

    def learn(self, duration_s: float) -> None:
        """An occurrence ended."""

    def killed(self, after_s: float) -> None:
        """An occurrence was killed at the limit."""

    def restart(self) -> None:
        """New processes; what the rule keeps, it keeps."""


class Learner:
    """`monitors.timeouts`, looked at 20 times a second. Restarts go through its JSON."""

    poll_s = 0.05

    def __init__(self, ceiling_s: float) -> None:
        self._ceiling_s, self._learner = ceiling_s, TimeoutLearner(ceiling_s)
        self.limit_s = lambda: self._learner._hard_s  # what decide().hard_s says, without the sentence
        self.learn = self._learner.observe

    def killed(self, after_s: float) -> None:
        """Goes into the rule."""
        self._learner.observe_kill(after_s)

    def restart(self) -> None:
        """Saved and loaded."""
        self._learner = TimeoutLearner.from_json(self._learner.to_json(), ceiling_s=self._ceiling_s)
        self.learn = self._learner.observe


class Nvrx:
    """5 x the longest ever in this process, from 16 occurrences on; calculated at the 16th and every `EVERY` after it (at saves, in Megatron); merged into the former
    calculated value by an average (alpha 0.5), which is what a restart keeps. Polls every 5 s."""

    poll_s = 5.0
    EVERY = 100

    def __init__(self, ceiling_s: float) -> None:
        self._limit_s, self._calculated = ceiling_s, False
        self._count, self._longest_s = 0, 0.0

    def limit_s(self) -> float:
        """As last calculated."""
        return self._limit_s

    def learn(self, duration_s: float) -> None:
        """Keeps the longest."""
        self._count += 1
        self._longest_s = max(self._longest_s, duration_s)
        if self._count == 16 or (self._count > 16 and self._count % self.EVERY == 0):
            new_s = 5.0 * self._longest_s
            self._limit_s = (new_s + self._limit_s) / 2 if self._calculated else new_s
            self._calculated = True

    def killed(self, after_s: float) -> None:
        """The process is new after a kill."""
        self.restart()

    def restart(self) -> None:
        """The longest and the count are the process's."""
        self._count, self._longest_s = 0, 0.0


class NvrxFast(Nvrx):
    """The same, polled every second."""

    poll_s = 1.0


class _Simple:
    """A rule that keeps the last `KEEP` durations, has our floor and our ceiling, and learns nothing from kills."""

    poll_s = 0.05
    KEEP = 64

    def __init__(self, ceiling_s: float) -> None:
        self._ceiling_s, self._count = ceiling_s, 0
        self._last: deque[float] = deque(maxlen=self.KEEP)
        self._limit: float | None = None

    def limit_s(self) -> float:
        """From 16 on."""
        if self._count < 16:
            return self._ceiling_s
        if self._limit is None:
            self._limit = min(self._ceiling_s, max(4.5, self.rule()))
        return self._limit

    def rule(self) -> float:
        """Seconds, before floor and ceiling."""
        raise NotImplementedError

    def learn(self, duration_s: float) -> None:
        """Into the window."""
        self._count += 1
        self._last.append(duration_s)
        self._limit = None

    def killed(self, after_s: float) -> None:
        """Nothing."""

    def restart(self) -> None:
        """Everything is kept."""


class WindowMax(_Simple):
    """4 x the longest of the last 64."""

    def rule(self) -> float:
        """As said."""
        return 4 * max(self._last)


class MedianMad(_Simple):
    """Median and median absolute deviation of ln(duration) over the last 64: 12 deviations, at least a factor 4."""

    def rule(self) -> float:
        """As said."""
        logs = [math.log(max(d, 1e-6)) for d in self._last]
        middle = statistics.median(logs)
        deviation = 1.4826 * statistics.median(abs(x - middle) for x in logs)
        return math.exp(middle + max(math.log(4), 12 * deviation))


class TwoWindows(_Simple):
    """The larger of 4 x the third longest of the last 64 and 2 x the longest of the last 1,024."""

    KEEP = 1024

    def rule(self) -> float:
        """As said."""
        recent = sorted(list(self._last)[-64:])
        return max(4 * recent[-3], 2 * max(self._last))


RULES: dict[str, type[Learner | Nvrx | _Simple]] = {"ft-launch": Learner, "nvrx": Nvrx}
MORE: dict[str, type[Learner | Nvrx | _Simple]] = {
    "nvrx, 1 s poll": NvrxFast,
    "4 x max of 64": WindowMax,
    "median + MAD": MedianMad,
    "two windows": TwoWindows,
}
