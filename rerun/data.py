"""The same samples again: an iterator that keeps what one step has drawn and gives it out a second time, in place and after a restart.

In place it is simple: rewind. After a restart the samples of the disputed step come from the checkpoint, and where the *source* stands depends on the script. Usually it
was put back to where the step began, as Megatron does (position = samples consumed by finished steps), and it is about to yield the very same samples: then they are drawn
and dropped. Or it was put to where it was when the checkpoint was taken, behind them: then what is drawn belongs to the next step and is kept for it. Which of the two
it is shows in the samples themselves, so nobody has to say it, and no sample is ever skipped or used twice.

Containers are copied, so that a step may take a batch apart; tensors are not, so a step must not change them in place. It knows nothing of states and ranks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rerun import registry


class RerunDataIterator:
    """Wraps the iterator (or iterable) of a training loop; Megatron's class of this name, with `iter` added."""

    def __init__(self, iterable: Iterable[Any] | Iterator[Any]) -> None:
        self.iterable: Any = iterable if hasattr(iterable, "__next__") else iter(iterable)
        self.saved_microbatches: list[Any] = []
        self.replaying = False
        self.replay_pos = 0
        self._early: deque[Any] = deque()  # drawn from the source already, to be given out later
        self._unchecked = 0  # how many of the last saved samples the source may be about to yield again

    def __iter__(self) -> RerunDataIterator:
        return self

    def __next__(self) -> Any:
        """The next sample of this step, from the step's first run or from the source. AssertionError when a repeated step asks for more than its first run did."""
        if self.replaying:
            assert self.replay_pos < len(self.saved_microbatches), "No more batches to replay: the step drew fewer when it was first run"
            sample = self.saved_microbatches[self.replay_pos]
            self.replay_pos += 1
            if self._unchecked and self.replay_pos > len(self.saved_microbatches) - self._unchecked:
                self._catch_up(sample)
            return _opened(sample)
        sample = self._early.popleft() if self._early else next(self.iterable)
        if registry.recording():
            self.saved_microbatches.append(sample)
            return _opened(sample)
        return sample

    def rewind(self) -> None:
        """Back to the first sample of the step."""
        self.replaying = True
        self.replay_pos = 0

    def advance(self) -> None:
        """On to the next step: forget what was drawn."""
        self.replaying = False
        self.saved_microbatches = []
        self.replay_pos = 0
        self._unchecked = 0

    def state_dict(self) -> dict[str, Any]:
        """The samples of the step, for a checkpoint."""
        early = {"early": list(self._early)} if self._early else {}
        return {"saved_microbatches": self.saved_microbatches, "replaying": self.replaying, "replay_pos": self.replay_pos} | early

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up the step of a checkpoint: its samples come first, from their beginning, wherever the source stands."""
        self.saved_microbatches = list(state_dict["saved_microbatches"])
        self.replaying = bool(self.saved_microbatches)
        self.replay_pos = 0
        self._unchecked = len(self.saved_microbatches)
        self._early = deque(state_dict.get("early", ()))

    def _catch_up(self, sample: Any) -> None:
        """Draw what the source yields in place of `sample`: dropped if it is the same, else kept for the next step."""
        self._unchecked -= 1
        if self._early:  # it stands behind the step: what it yields from here on is new
            return
        try:
            drawn = next(self.iterable)
        except StopIteration:
            return
        if not same(drawn, sample):
            self._early.append(drawn)


def same(one: Any, other: Any) -> bool:
    """Whether two samples are equal: containers by their parts, tensors and arrays by dtype, shape and every element (NaN equals NaN), wherever they are."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "dtype") and hasattr(other, "dtype") and hasattr(one, "shape"):
        return _same_array(one, other)
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    try:
        return bool(one == other)
    except Exception:  # noqa: BLE001  a sample of a type that cannot be compared
        return False


def _same_array(one: Any, other: Any) -> bool:
    if str(one.dtype) != str(other.dtype) or tuple(one.shape) != tuple(other.shape):
        return False
    one, other = (part.detach().cpu() if hasattr(part, "detach") else part for part in (one, other))
    equal = (one == other) | ((one != one) & (other != other))  # noqa: PLR0124  NaN
    return bool(equal.all())


def _opened(sample: Any) -> Any:
    """The sample in containers of its own, as far as they are plain ones."""
    if type(sample) is dict:
        return {key: _opened(part) for key, part in sample.items()}
    if type(sample) in (list, tuple):
        return type(sample)(_opened(part) for part in sample)
    return sample
