"""Megatron's own parallel flags, found in the script's arguments: whoever has written `--tensor-model-parallel-size 8` once need not say
`--tp 8` as well.

Reads, never changes: the arguments reach the script as they are. Follows argparse as Megatron-LM uses it: the last occurrence counts,
`--flag N` and `--flag=N` are the same, nothing is a flag behind `--`. What Megatron itself would refuse (a size that is no number) is
left to Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SIZES = {
    "--tensor-model-parallel-size": "tp",
    "--pipeline-model-parallel-size": "pp",
    "--context-parallel-size": "cp",
    "--expert-model-parallel-size": "ep",
    "--expert-tensor-parallel-size": "etp",
}
MAPPING_FLAG = "--use-tp-pp-dp-mapping"
MAPPING_ORDER = "tp-cp-ep-pp-dp"


@dataclass(frozen=True, slots=True)
class Said:
    """What the script's arguments say about one of our options, and with which flag."""

    text: str
    flag: str


def megatron_says(args: Sequence[str]) -> dict[str, Said]:
    """Option name (`tp`, ..., `rank-order`) -> what the script's own arguments say; empty for a script without Megatron's flags."""
    found: dict[str, Said] = {}
    for at, arg in enumerate(args):
        if arg == "--":
            break
        flag, equals, text = arg.partition("=")
        if arg == MAPPING_FLAG:
            found["rank-order"] = Said(MAPPING_ORDER, MAPPING_FLAG)
        elif flag in SIZES:
            value = text if equals else (args[at + 1] if at + 1 < len(args) else "")
            if value.isascii() and value.isdigit() and len(value) < 19 and int(value) > 0:
                found[SIZES[flag]] = Said(str(int(value)), flag)
    return found
