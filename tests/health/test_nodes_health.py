"""Health checks of several nodes: the one that fails is replaced; a check that fails everywhere is at fault itself."""

from __future__ import annotations

import pytest

from tests.multinode.conftest import Make, make, shared_etcd

__all__ = ["make", "shared_etcd"]
pytestmark = pytest.mark.serial
CRASH = [{"rank": 0, "cycle": 0, "at": 3, "do": "exit", "value": 3}]


def test_a_node_that_fails_between_cycles_is_replaced_by_the_spare(make: Make) -> None:
    check = '[ "$FT_NODE_ID" != n1 ] || [ $FT_HEALTH_REASON = start ] || { echo its third card is gone; exit 1; }'
    job = make().start("n0", "n1", options=["--health-check", check], plan=CRASH)
    job.until(lambda: job.cycle() >= 0, "the first cycle")
    job.start("n2", options=["--health-check", check], plan=CRASH)
    after = job.until_step(1)
    assert set(after) == {"n0", "n2"}
    (decision,) = job.decisions()
    assert (decision["rule"], decision["decision"]) == (5, "replace")
    assert "node n1: health check: " in decision["reason"] and "exit 1: its third card is gone" in decision["reason"]
    assert job["n1"].running()


def test_a_spare_that_fails_takes_no_hole(make: Make) -> None:
    check = '[ "$FT_NODE_ID" != n2 ]'
    job = make().start("n0", "n1", options=["--health-check", check])
    job.until_step(0)
    job.start("n2", options=["--health-check", check])
    job.until(lambda: (job.stored("reports/n2") or {}).get("unfit"), "the spare is checked")
    job["n1"].kill_agent()
    job.until(lambda: any("waiting up to" in job[n].said() for n in ("n0", "n2")), "nobody takes the hole")
    job.add_spares("n3", options=["--health-check", check])
    assert set(job.until_step(1)) == {"n0", "n3"}


def test_a_check_that_fails_on_all_nodes_stops_nothing_and_is_said(make: Make) -> None:
    """After the first cycle the file that it looks for is gone for everybody."""
    check = "[ $FT_HEALTH_REASON = start ] || { echo cannot read /shared/limits; exit 1; }"
    job = make().start("n0", "n1", options=["--health-check", check], plan=[*CRASH, {**CRASH[0], "cycle": 1}])
    job.until_step(2)
    (first, second) = job.decisions()
    assert (first["rule"], second["rule"]) == (10, 10)
    said = "\n".join(job[node].said() for node in ("n0", "n1"))
    assert said.count("the health check fails on all 2 nodes at once, so the check is at fault, not they; going on without it") == 1
    assert "cannot read /shared/limits" in said
    asked = [e for e in job.journal("health-check") if e["why"] == "restart"]
    assert len(asked) == 2  # once on each node, and not any more


def test_a_check_that_never_passes_anywhere_does_not_keep_the_job_from_starting(make: Make) -> None:
    job = make().start("n0", "n1", options=["--health-check", "no-such-check"])
    job.until_step(0)
    assert "the health check fails on all 2 nodes at once" in "\n".join(job[node].said() for node in ("n0", "n1"))
