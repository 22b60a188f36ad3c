"""The checkpoint folder, fenced as `monitors/fence.py` does it: a number for each claim, and only the newest number is ever read.

An owner that was asleep between its last check and its rename still writes, but into its own number. It knows steps and numbers, not files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Storage:
    """`reached`: the furthest step any cycle completed. `owners`: which cycle holds which number; `newest`: the newest cycle whose commit counted; `disorder`: what went wrong."""

    number: int = 0
    reached: int = 0
    refused: int = 0
    latest: dict[int, int] = field(default_factory=dict)
    owners: dict[int, tuple[int, int]] = field(default_factory=dict)
    newest: tuple[int, int] = (-1, -1)
    disorder: str | None = None
    questions: dict[int, Any] = field(default_factory=dict)

    @property
    def question(self) -> Any:
        """What the checkpoint that a load would choose asks of other hardware; None: nothing."""
        return self.questions.get(self.number)

    @property
    def saved(self) -> int:
        """Steps in the checkpoint that a load would choose."""
        return self.latest.get(self.number, 0)

    def claim(self, owner: tuple[int, int]) -> int:
        """A cycle (generation, number) loads: it owns the folder from now on, and starts from what `saved` says."""
        chosen, question = self.saved, self.question
        self.number += 1
        self.latest = {self.number - 1: chosen, self.number: chosen}
        self.questions = {self.number: question} if question is not None else {}
        self.owners[self.number] = owner
        return self.number

    def commit(self, number: int, saved: int, question: Any = None) -> bool:
        """The owner of that number has a complete checkpoint of so many steps, which may carry a question. False: it is superseded, and what it wrote is not read."""
        if saved < self.latest.get(number, 0) or (saved == self.latest.get(number, 0) and question is None):
            return number == self.number
        self.latest[number] = saved
        self.questions.pop(number, None)
        if question is not None:
            self.questions[number] = question
        if number != self.number:
            self.refused += 1
            return False
        self._accept(number, saved)
        return True

    def _accept(self, number: int, saved: int) -> None:
        owner = self.owners[number]
        if owner < self.newest:
            self.disorder = f"cycle {owner[1]} of launch {owner[0]} has committed step {saved} after cycle {self.newest[1]} of launch {self.newest[0]} had committed"
        self.newest = max(owner, self.newest)

    def clear(self) -> None:
        """The training is complete; the next one begins in an empty folder."""
        self.latest, self.reached, self.questions = {}, 0, {}
