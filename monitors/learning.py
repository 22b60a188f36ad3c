"""All sections' learned timeouts of one job: samples of all nodes in, limits out. Pure; one exists, in the controller.

It merges what the nodes report (one sample an occurrence), keeps the occurrences that do something, and lets each section's learner judge. What is learned is kept under a name
that is the same exactly when section, topology, script and arguments are, so that the next run starts with it and another job never does. Sections without a fixed value of
their own are not learned. It knows neither ranks nor files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from monitors.timeouts import Timeout, TimeoutLearner
from monitors.timeouts_book import WARMUP, Occurrence, Relevance, SectionBook, learning_key

KEPT = 64
"""Records of other jobs that are carried along, newest last."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A node's part of one occurrence: its longest duration over the node's ranks."""

    section: str
    index: int
    duration_s: float


class _Section:
    """One section: is it an occurrence at all, and what follows from it."""

    def __init__(self, name: str, ceiling_s: float, record: object) -> None:
        known = record if isinstance(record, Mapping) else {}
        self.relevance = Relevance.from_json(known.get("relevance"), name, ceiling_s)
        fresh = "learner" not in known
        self.learner = TimeoutLearner(ceiling_s) if fresh else TimeoutLearner.from_json(known["learner"], ceiling_s=ceiling_s)

    def observe(self, occurrence: Occurrence) -> None:
        """One occurrence, in order."""
        if self.relevance.counts(occurrence.duration_s):
            self.learner.observe(occurrence.duration_s, warmup=occurrence.warmup)

    def to_json(self) -> dict[str, object]:
        return {"learner": self.learner.to_json(), "relevance": self.relevance.to_json()}


class Learning:
    """`ceilings_s`: the fixed timeouts by section, which no learned one exceeds. `job`: (topology, script, arguments). `records`: what `to_json` gave before."""

    def __init__(
        self, ceilings_s: Mapping[str, float], job: tuple[Mapping[str, object], str, Iterable[str]], records: object = None
    ) -> None:
        known = dict(records) if isinstance(records, Mapping) else {}
        topology, script, arguments = job
        self._keys = {name: learning_key(name, topology, script, tuple(arguments)) for name in ceilings_s}
        self._sections = {name: _Section(name, ceiling_s, known.get(self._keys[name])) for name, ceiling_s in ceilings_s.items()}
        self._others = {key: value for key, value in known.items() if key not in self._keys.values()}
        self._book: SectionBook | None = None
        self._limits = {name: section.learner.decide().hard_s for name, section in self._sections.items()}

    def begin_cycle(self, nodes: int) -> None:
        """A cycle of so many nodes starts: what the former one left unfinished is learned as it is."""
        if self._book is not None:
            self._observe(self._book.flush())
        self._book = SectionBook(nodes)

    def add(self, node: int, samples: Iterable[Sample]) -> bool:
        """What a node (its position) reports. True when a limit has changed."""
        if self._book is None:
            return False
        for sample in samples:
            self._observe(self._book.add(sample.section, node, sample.index, sample.duration_s))
        return self._changed()

    def killed(self, section: str, after_s: float) -> bool:
        """A rank was ended as hung in this section after so long: no sample, but a reason to be slower. True when a limit has changed."""
        if section in self._sections:
            self._sections[section].learner.observe_kill(after_s)
        return self._changed()

    def timeouts(self) -> dict[str, Timeout]:
        """Every section's timeout now, with its reason."""
        return {name: section.learner.decide() for name, section in self._sections.items()}

    def distributions(self) -> dict[str, Mapping[str, object]]:
        """What dashboards draw, for sections that have been seen."""
        return {name: section.learner.distribution() for name, section in self._sections.items() if section.learner.count}

    def to_json(self) -> dict[str, object]:
        """Everything learned, by job and section; the newest `KEPT` of other jobs are kept."""
        kept = dict(list(self._others.items())[-KEPT:])
        return kept | {self._keys[name]: section.to_json() for name, section in self._sections.items() if section.learner.count}

    def _observe(self, occurrences: Iterable[Occurrence]) -> None:
        for occurrence in occurrences:
            section = self._sections.get(occurrence.section)
            if section is not None:
                section.observe(occurrence)

    def _changed(self) -> bool:
        now = {name: section.learner.decide().hard_s for name, section in self._sections.items()}
        changed = now != self._limits
        self._limits = now
        return changed


class NodeSamples:
    """The agent's half: merges the occurrences of its own ranks (positions 0 ... ranks - 1) before they travel."""

    def __init__(self, ranks: int) -> None:
        self._book = SectionBook(ranks, warmup={})
        self._after: dict[tuple[int, str], int] = {}

    def after(self, rank: int, section: str) -> int:
        """The last index that was taken of this rank's section, -1 for none."""
        return self._after.get((rank, section), -1)

    def add(self, rank: int, section: str, occurrences: Iterable[tuple[int, int]]) -> list[Sample]:
        """A rank's new (index, duration in ns), in order. Returns what is complete now."""
        found: list[Sample] = []
        for index, took_ns in occurrences:
            self._after[(rank, section)] = index
            found += [Sample(o.section, o.index, o.duration_s) for o in self._book.add(section, rank, index, took_ns / 1e9)]
        return found


WARMUP_STEPS = WARMUP
"""While a rank has completed fewer steps of its cycle than this, the step's fixed value holds."""
