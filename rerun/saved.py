"""What a fault checkpoint holds of a rank's machine: in plain words, with Megatron's keys.

Plain, because checkpoints are unpickled with care: strings, numbers, and the tensors that are the script's own (the disputed result, the samples of the step). A state
that Megatron itself has saved is understood too. It knows the dictionary; what the state means, the table knows (rerun/machine.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rerun import ranks
from rerun.compare import beside
from rerun.large import Largest
from rerun.machine import RESUMABLE
from rerun.place import Place, recorded
from rerun.words import Flags, RerunMode, RerunState, Resumed

TORCH_DIST, PER_RANK = "torch_dist", "per_rank"
FLAG_KEYS = {
    "rerun": "rerun_requested",
    "checkpoint": "checkpoint_requested",
    "restart_again": "restart_again_requested",
    "proceed": "continue_requested",
}
logger = logging.getLogger(__name__)


class Call(NamedTuple):
    """The n-th check with this message within a step, from 1."""

    message: str
    sequence: int


@dataclass(frozen=True, slots=True)
class Disputed:
    """The result that this rank disputes, by which check, and where it came out twice; all None: nothing disputed."""

    call: Call | None = None
    result: Any = None
    place: Place | None = None

    def first(self, now: Any) -> Any:
        """The result of the first run, on the device of the one it is compared with."""
        return beside(self.result, now)


@dataclass(frozen=True, slots=True)
class Saved:
    """One rank's part."""

    flags: Flags
    disputed: Disputed
    injector: Mapping[str, Any]
    samples: list[Any] | None
    largest: Largest = field(default_factory=Largest)

    def as_state_dict(self, mode: RerunMode, state: RerunState, iteration: int, ckpt_format: str) -> dict[str, Any] | None:
        """The whole, in `ckpt_format`; None, and a warning, where that cannot hold something of each rank."""
        if ckpt_format not in (TORCH_DIST, PER_RANK):
            logger.warning(
                "The rerun state is not saved: checkpoint format %r cannot hold it, only %s and %s can", ckpt_format, TORCH_DIST, PER_RANK
            )
            return None
        sharded = self._plain() if ckpt_format == PER_RANK else _sharded_object(self._plain())
        return {"mode": mode.value, "state": state.value, "current_iteration": iteration, "sharded": sharded}

    @classmethod
    def of(cls, sharded: Mapping[str, Any]) -> Saved:
        """From a checkpoint."""
        found = sharded["failed_validation_call"]
        place = recorded(sharded["suspicious_node"], sharded["suspicious_device"])
        return cls(
            Flags(**{name: bool(sharded[key]) for name, key in FLAG_KEYS.items()}),
            Disputed(None if found is None else _call(*found), sharded["initial_result"], place),
            sharded["error_injector_checkpoint"],
            sharded["data_iterator_checkpoints"],
            Largest(dict(sharded["large_value_counts"]), dict(sharded["max_values"])),
        )

    def resumed(self, state: RerunState) -> Resumed:
        """The event for the machine."""
        return Resumed(state, self.flags)

    def _plain(self) -> dict[str, Any]:
        call, place = self.disputed.call, self.disputed.place
        return {key: getattr(self.flags, name) for name, key in FLAG_KEYS.items()} | {
            "error_injector_checkpoint": dict(self.injector),
            "failed_validation_call": None if call is None else list(call),
            "initial_result": self.disputed.result,
            "suspicious_node": None if place is None else place.node,
            "suspicious_device": None if place is None else place.device,
            "data_iterator_checkpoints": self.samples,
            "large_value_counts": dict(self.largest.counts),
            "max_values": dict(self.largest.maxima),
        }


def state_in(state_dict: Mapping[str, Any] | None) -> RerunState | None:
    """The state that a checkpoint was saved in; None where there is none, or none that exists."""
    found = (state_dict or {}).get("state")
    name = str(getattr(found, "name", found)).lower()
    return next((state for state in RerunState if state.value == name), None)


def asks(state_dict: Mapping[str, Any] | None) -> bool:
    """Whether a checkpoint was saved with a question for the next device."""
    return state_in(state_dict) in RESUMABLE


def _call(caller: Any, sequence: int) -> Call:
    """Megatron's caller is (message, rank)."""
    return Call(caller if isinstance(caller, str) else caller[0], sequence)


def _sharded_object(plain: dict[str, Any]) -> Any:
    """Each rank's own part of a checkpoint in Megatron's format, which is what understands it: ImportError where there is no megatron.core."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    return ShardedObject("rerun_state_machine_state", plain, (ranks.world_size(),), (ranks.rank(),))
