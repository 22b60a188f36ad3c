"""Where this rank computes, so that "the same device" means the same silicon.

Megatron compares (host name, CUDA index). The index says little: with one visible device per rank it is always 0, and after a renumbering another one; several agents of
one host share its name; on a CPU every rank is the same. So: a GPU is its UUID, wherever it is plugged in and whatever the node is called; without a GPU in use a place
is what the launcher calls it, node id and slot; outside the launcher host name and index are all there is.

It reads the environment and asks a torch that is there already. It must never import torch, initialise CUDA or raise.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GPU, SLOT, INDEX = "GPU-", "slot:", "index:"


@dataclass(frozen=True, slots=True)
class Place:
    """A node's name and a device's: `GPU-<uuid>`, `slot:<n>` or `index:<n>`."""

    node: str
    device: str

    def same(self, other: Place) -> bool:
        """Whether both are one device. A UUID says it alone: a node may come back under another name."""
        return self.device == other.device and (self.node == other.node or self.device.startswith(GPU))

    def __str__(self) -> str:
        return f"node {self.node}, device {self.device}"


def here(environ: Mapping[str, str] = os.environ) -> Place:
    """This process's place, now."""
    node = environ.get("FT_NODE_ID") or os.uname().nodename
    return Place(node, _gpu(sys.modules.get("torch")) or _slot(environ))


def recorded(node: object, device: object) -> Place | None:
    """The place that a checkpoint speaks of, or None where the words are not ours (Megatron's own: an integer or a torch.device)."""
    ours = isinstance(node, str) and isinstance(device, str) and device.startswith((GPU, SLOT, INDEX))
    return Place(str(node), str(device)) if ours else None


def _gpu(torch: Any) -> str:
    """The UUID of the current GPU once CUDA is in use; a process that has not touched CUDA does not compute on it."""
    try:
        if not torch.cuda.is_initialized():
            return ""
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    except Exception:  # noqa: BLE001  no torch, half-imported, too old to know, a stand-in for a GPU: the slot says it
        return ""
    return GPU + uuid.removeprefix(GPU) if uuid else ""


def _slot(environ: Mapping[str, str]) -> str:
    if environ.get("FT_NODE_ID") and environ.get("FT_SLOT"):
        return SLOT + environ["FT_SLOT"]
    return INDEX + (environ.get("LOCAL_RANK") or "0")
