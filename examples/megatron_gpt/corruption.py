"""A device that computes wrong numbers, on demand: `--inject KIND --at ITERATION --on RANK`.

What is spoiled is real: one element of that rank's gradients gets all bits of its exponent set, as a broken adder would leave it. What the fault belongs to makes the kind:
a moment (`transient`: strikes once), a device (`persistent`: from that iteration on, wherever the rank was when it first struck, so that another device cures it), or the
program (`application`: in that iteration, on every device). What has struck, and where, is remembered in the checkpoint folder, for each restart is a new process.
It must never know what becomes of the wrong number.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch

from rerun.place import Place, here

EXPONENT = 0x7F800000


class Corruption:
    """The fault of this run, seen from one rank; does nothing on the others."""

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        self._kind = args.inject if args.on == rank else None
        self._at = args.at
        self._memory = Path(args.save or ".") / f"injected_{self._kind}.json"

    def strike(self, iteration: int, gradients: torch.Tensor) -> None:
        """Spoil one element of `gradients` (flat, float32), if it is time and this is the place."""
        if self._kind is None or not self._strikes(iteration):
            return
        bits = gradients.view(torch.int32)
        bits[0] = bits[0] | EXPONENT
        print(f"injected: a {self._kind} fault spoils a gradient in iteration {iteration} on {here()}", flush=True)

    def _strikes(self, iteration: int) -> bool:
        if self._kind == "application":
            return bool(iteration == self._at)
        if self._kind == "transient":
            return iteration == self._at and self._first_place() is None
        first = self._first_place() if iteration >= self._at else None
        return iteration >= self._at and (first is None or first.same(here()))

    def _first_place(self) -> Place | None:
        """Where it has struck before; None the first time, which is remembered."""
        try:
            return Place(**json.loads(self._memory.read_bytes()))
        except FileNotFoundError:
            place = here()
        draft = self._memory.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps({"node": place.node, "device": place.device}))
        draft.rename(self._memory)
        return None
