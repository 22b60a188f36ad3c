"""What a step began with, so that it can be computed again: samples, random generators, and whatever the script says that it changes.

It knows data iterators and generators; it must never know why a step is repeated.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from rerun import generators
from rerun.data import RerunDataIterator
from rerun.words import RerunMode


class Step:
    """One step after the other. `samples`: what a checkpoint has brought for the next one, until it is taken up."""

    def __init__(self, save: Callable[[], Any] | None, restore: Callable[[Any], None] | None) -> None:
        self._save, self._put_back = save, restore
        self._generators: generators.Restore | None = None
        self._own: Any = None
        self.samples: list[Any] | None = None

    def begin(self, iterators: list[RerunDataIterator]) -> None:
        """A new step begins here."""
        for iterator in iterators:
            iterator.advance()
        self.take_up(iterators)
        self._generators = generators.take()
        self._own = self._save() if self._save else None

    def rewind(self, iterators: list[RerunDataIterator]) -> None:
        """Back to where it began."""
        if self._generators is not None:
            self._generators()
        if self._own and self._put_back:
            self._put_back(copy.deepcopy(self._own))  # it may be used up, and the step may be rewound twice
        for iterator in iterators:
            iterator.rewind()

    def take_up(self, iterators: list[RerunDataIterator]) -> None:
        """The step of a checkpoint, if there is one: its samples come first."""
        samples, self.samples = self.samples, None
        if samples is None:
            return
        assert len(samples) == len(iterators), f"{len(iterators)} data iterators, but the checkpoint has samples for {len(samples)}"
        for iterator, state in zip(iterators, samples, strict=True):
            iterator.load_state_dict(state)


def wrapped(data_iterator: Any, mode: RerunMode) -> list[RerunDataIterator]:
    """The data iterators of a step as a list: none in mode DISABLED. AssertionError for one that cannot be rewound."""
    if mode is RerunMode.DISABLED:
        return []
    given = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    iterators = [iterator for iterator in given if iterator is not None]
    for iterator in iterators:
        assert isinstance(iterator, RerunDataIterator), f"data iterator is not wrapped with RerunDataIterator: {type(iterator).__name__}"
    return iterators
