"""Drives Megatron's RerunStateMachine and ours through the same story, several ranks in one process, and writes down all that can be seen of them.

A `Story` is data: steps with checks, faults that strike a rank's result by run, place or always, injected errors, and the places of each life. `Theatre` plays it with
one of the two casts (`Cast`); a life ends when the machines say so or the story is over, the next one resumes from the checkpoint, pickled. Ranks take turns, so what
`all ranks agree on` is looked up instead of reduced.
"""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rerun import tracker


@dataclass(frozen=True)
class Check:
    message: str
    fatal: bool = True
    tolerance: float = 0.0


@dataclass(frozen=True)
class Fault:
    """Spoils the result of `check` of `rank` in `step`: `transient` in the first run, `persistent` where it first struck, `application` always; `drift` a little each run."""

    step: int
    rank: int
    check: int
    kind: str


@dataclass(frozen=True)
class Story:
    checks: tuple[Check, ...]
    faults: tuple[Fault, ...] = ()
    lives: tuple[tuple[tuple[str, int], ...], ...] = ((("a", 0),),) * 4
    steps: int = 5
    batches: int = 1
    injection: tuple[int, str] = (0, "transient_error")
    mode: str = "validate_results"
    seed: int = 0


@dataclass
class Cast:
    """One implementation: how to make its parts, and how to tell them who speaks and where."""

    machine: Callable[..., Any]
    iterator: Callable[[Iterator[Any]], Any]
    injector: Callable[[int, str], Any]
    mode: Callable[[str], Any]
    speak: Callable[[int, tuple[str, int], list[Any]], None]
    """(rank, place, all machines) of whoever acts next"""
    forget: Callable[[Any], None] = lambda _: None
    """called for each machine when a step begins"""


@dataclass
class Theatre:
    cast: Cast
    story: Story
    folder: Path
    seen: list[Any] = field(default_factory=list)
    first_place: dict[Fault, tuple[str, int]] = field(default_factory=dict)
    struck: set[Fault] = field(default_factory=set)

    def play(self) -> list[Any]:
        """Everything that was seen, over all lives."""
        random.seed(self.story.seed)
        checkpoint: bytes | None = None
        step, keep = 0, False
        for places in self.story.lives:
            step, code, saved = self._live(places, step, checkpoint if keep else None)
            checkpoint = saved or checkpoint
            keep = code == 16
            if code is None:
                break
        entries = tracker.read(str(self.folder / "tracker"))
        self.seen.append([(e.rank, e.iteration, e.status.name, e.result, e.message) for e in entries])
        return self.seen

    def _live(self, places: tuple[tuple[str, int], ...], step: int, checkpoint: bytes | None) -> tuple[int, int | None, bytes | None]:
        machines = [self._machine() for _ in places]
        sources = [self.cast.iterator(iter(range(step * self.story.batches, 10_000))) for _ in places]
        if checkpoint is not None:
            for rank, state in enumerate(pickle.loads(checkpoint)):
                self.cast.speak(rank, places[rank], machines)
                self.seen.append(("valid", machines[rank].validate_state_dict(state)))
                machines[rank].load_state_dict(state)
        while step < self.story.steps:
            leave, saved = self._step(step, places, machines, sources)
            if leave is not None:
                return step, leave, saved
            step += 1
        return step, None, None

    def _machine(self) -> Any:
        rate, kind = self.story.injection
        return self.cast.machine(
            mode=self.cast.mode(self.story.mode),
            error_injector=self.cast.injector(rate, kind),
            result_rejected_tracker_filename=str(self.folder / "tracker"),
        )

    def _step(
        self, step: int, places: tuple[tuple[str, int], ...], machines: list[Any], sources: list[Any]
    ) -> tuple[int | None, bytes | None]:
        run = 0
        if all(m.state.name == "NOT_RUNNING_YET" for m in machines):
            for machine in machines:
                self.cast.forget(machine)
        while True:
            answers = []
            for rank, machine in enumerate(machines):
                self.cast.speak(rank, places[rank], machines)
                answers.append(machine.should_run_forward_backward(sources[rank]))
            self.seen.append(("run", step, answers, [m.state.name for m in machines]))
            assert len(set(answers)) == 1
            if not answers[0]:
                break
            for rank, machine in enumerate(machines):
                self.cast.speak(rank, places[rank], machines)
                self._compute(step, rank, run, places[rank], machine, sources[rank])
            run += 1
        ends = []
        for rank, machine in enumerate(machines):
            self.cast.speak(rank, places[rank], machines)
            ends.append(machine.should_checkpoint_and_exit())
        self.seen.append(("end", step, ends))
        (end,) = set(ends)
        saved = self._save(places, machines, sources) if end[0] else None
        return (end[2] if end[1] else None), saved

    def _save(self, places: tuple[tuple[str, int], ...], machines: list[Any], sources: list[Any]) -> bytes:
        states = []
        for rank, machine in enumerate(machines):
            self.cast.speak(rank, places[rank], machines)
            state = machine.state_dict(sources[rank], "torch_dist")
            states.append(state | {"sharded": state["sharded"].data})
        return pickle.dumps(states)

    def _compute(self, step: int, rank: int, run: int, place: tuple[str, int], machine: Any, source: Any) -> None:
        drawn = [next(source) for _ in range(self.story.batches)]
        noise = random.random()
        self.seen.append(("samples", step, rank, drawn, noise))
        for index, check in enumerate(self.story.checks):
            value = self._value(step, rank, index, run, place, float(sum(drawn) + rank + index / 4 + noise))
            try:
                machine.validate_result(
                    torch.tensor(value), _is_wrong, check.message, None if index % 2 else _difference, check.tolerance, check.fatal
                )
            except RuntimeError as error:
                self.seen.append(("error", str(error).partition("Unexpected")[2]))
            self.seen.append((rank, index, machine.state.name))

    def _value(self, step: int, rank: int, index: int, run: int, place: tuple[str, int], good: float) -> float:
        for fault in (f for f in self.story.faults if (f.step, f.rank, f.check) == (step, rank, index)):
            first = fault not in self.struck
            self.struck.add(fault)
            where = self.first_place.setdefault(fault, place)
            if fault.kind == "application" or (fault.kind == "persistent" and where == place) or (fault.kind == "transient" and first):
                return math.nan if index else -5.0
            if fault.kind == "drift":
                return -1.0 - 0.01 * (run + len(self.seen) % 7)
        return good


def _is_wrong(result: torch.Tensor) -> bool:
    return bool(torch.isnan(result)) or float(result) < 0


def _difference(first: torch.Tensor, now: torch.Tensor) -> float:
    return abs(float(first) - float(now))


def random_story(seed: int) -> Story:
    """Any story, from one number."""
    r = random.Random(seed)
    ranks = r.choice((1, 1, 2, 3))
    checks = tuple(
        Check(r.choice(("loss", "norm", "loss")), r.random() < 0.65, r.choice((0.0, 0.0, 0.02, 10.0))) for _ in range(r.randint(1, 3))
    )
    steps = r.randint(3, 7)
    kinds = ("transient", "persistent", "application", "drift")
    faults = tuple(
        Fault(r.randrange(steps), r.randrange(ranks), r.randrange(len(checks)), r.choice(kinds)) for _ in range(r.choice((0, 1, 1, 2, 3)))
    )
    nodes = [(name, device) for name in "ab" for device in range(3)]
    lives = tuple(tuple(r.sample(nodes, ranks)) for _ in range(6))
    lives = tuple(life if r.random() < 0.6 else lives[max(0, n - 1)] for n, life in enumerate(lives))
    rate = r.choice((0, 0, 0, 2, 5))
    kind = r.choice(("correct_result", "transient_error", "persistent_error"))
    mode = r.choice(("validate_results",) * 8 + ("report_determinism_stats", "disabled"))
    return Story(checks, faults, lives, steps, r.randint(1, 2), (rate, kind), mode, seed)
