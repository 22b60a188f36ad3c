"""The same samples again, in place and after a restart, wherever the source stands; and no sample skipped or used twice."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rerun import initialize_rerun_state_machine, registry
from rerun.data import RerunDataIterator, same
from rerun.words import RerunMode


@pytest.fixture(autouse=True)
def machine() -> Iterator[None]:
    registry.destroy_rerun_state_machine()
    initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
    yield
    registry.destroy_rerun_state_machine()


def samples(first: int = 0) -> Iterator[dict[str, Any]]:
    n = first
    while True:
        yield {"tokens": torch.tensor([n, n + 1]), "mask": [n % 2 == 0]}
        n += 1


def numbers(drawn: list[dict[str, Any]]) -> list[int]:
    return [int(sample["tokens"][0]) for sample in drawn]


def draw(iterator: RerunDataIterator, count: int) -> list[int]:
    return numbers([next(iterator) for _ in range(count)])


def test_again_in_place() -> None:
    iterator = RerunDataIterator(samples())
    iterator.advance()
    first = draw(iterator, 3)
    for _ in range(2):
        iterator.rewind()
        assert draw(iterator, 3) == first == [0, 1, 2]
    with pytest.raises(AssertionError, match="No more batches"):
        next(iterator)
    iterator.advance()
    assert draw(iterator, 2) == [3, 4]


@settings(max_examples=60, deadline=None)
@given(before=st.integers(0, 3), batches=st.integers(1, 4), behind=st.booleans(), again=st.booleans())
def test_again_after_a_restart(before: int, batches: int, behind: bool, again: bool) -> None:
    """`behind`: the source was put to where it was when the checkpoint was taken, else to where the step began."""
    iterator = RerunDataIterator(samples())
    for _ in range(before):
        iterator.advance()
        draw(iterator, batches)
    iterator.advance()
    step = draw(iterator, batches)
    iterator.rewind()
    saved = pickle.dumps(iterator.state_dict())
    position = (before + behind) * batches
    first = True
    for _ in range(1 + again):
        resumed = RerunDataIterator(samples(position))
        resumed.load_state_dict(pickle.loads(saved))
        assert draw(resumed, batches) == step
        resumed.rewind()  # a second fault checkpoint: a source that stood behind the step is further by the one sample that showed it
        saved, position = pickle.dumps(resumed.state_dict()), position + (behind and first)
        first = False
    for number in range(1, 4):
        resumed.advance()
        assert draw(resumed, batches) == [(before + number) * batches + n for n in range(batches)]


def test_a_source_that_ends_with_the_step() -> None:
    resumed = RerunDataIterator(iter(()))
    resumed.load_state_dict({"saved_microbatches": [{"tokens": torch.tensor([5])}], "replaying": True, "replay_pos": 1})
    assert draw(resumed, 1) == [5]
    resumed.advance()
    with pytest.raises(StopIteration):
        next(resumed)


def test_a_step_may_take_its_batch_apart() -> None:
    iterator = RerunDataIterator([{"tokens": [1, (2, {"x": 3})]}])
    iterator.advance()
    batch = next(iterator)
    batch["tokens"][1][1].clear(), batch.pop("tokens")
    iterator.rewind()
    assert next(iterator) == {"tokens": [1, (2, {"x": 3})]}


def test_nothing_is_kept_while_disabled() -> None:
    registry.get_rerun_state_machine().set_mode(RerunMode.DISABLED)
    iterator = RerunDataIterator(range(5))
    assert [next(iterator), next(iterator)] == [0, 1] and not iterator.saved_microbatches and list(iterator) == [2, 3, 4]


def test_what_is_the_same() -> None:
    nan = float("nan")
    alike = [1, "x", None, nan, torch.tensor([1.0, nan]), np.array([[1, 2]]), {"a": [torch.zeros(2), (3,)]}, torch.zeros(0)]
    for n, one in enumerate(alike):
        for m, other in enumerate(pickle.loads(pickle.dumps(alike))):
            assert same(one, other) == (n == m), (one, other)
    assert not same(torch.zeros(2), torch.zeros(2, dtype=torch.int64)) and not same([1], [1, 2])
    assert not same(np.array([1.0, 2.0]), np.array([1.0, 3.0])) and not same({"a": 1}, {"b": 1})
