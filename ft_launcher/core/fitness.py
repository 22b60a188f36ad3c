"""Whether a health check is to be believed: words that node and controller share.

A check that fails on one node tells of that node; one that fails on all of them at once tells of itself (a typing error, a file system that is away, a limit set too tight), and taking
every node out would stop the job for nothing. One node alone cannot tell the two apart: there the check counts. It knows sentences and nodes; what is done with them is the job
machine's.
"""

from __future__ import annotations

from collections.abc import Mapping

CHECK = "health check"
"""What a report's `unfit` begins with when the user's check says so: the only finding that may be overruled."""


def failed_check(reason: str) -> str:
    """The sentence for a node whose check has failed."""
    return f"{CHECK}: {reason}"


def by_check(unfit: str | None) -> bool:
    """Whether a node is unfit only because its check says so."""
    return unfit is not None and unfit.startswith(f"{CHECK}: ")


def overruled(unfit: Mapping[str, str | None]) -> str | None:
    """`unfit`: every node that has been checked, and why it is unfit (None: it is not). One sentence when the check is at fault, None when it is to be believed."""
    if len(unfit) < 2 or not all(by_check(why) for why in unfit.values()):
        return None
    node, why = min((n, w or "") for n, w in unfit.items())
    return (
        f"the health check fails on all {len(unfit)} nodes at once, so the check is at fault, not they; going on without it ({node}: {why})"
    )
