"""Wrong numbers on several nodes over a real etcd: the spare takes the suspect's node, or the suspect another slot; verdicts hold for the next generation, too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.multinode.cluster import Cluster
from tests.multinode.conftest import make, shared_etcd  # noqa: F401 - fixtures

Make = Callable[..., Cluster]
WORKER = Path(__file__).with_name("worker.py")


def begin(job: Cluster, *nodes: str, env: dict[str, dict[str, str]] | None = None, **conf: Any) -> Cluster:
    work = job.folder / "work"
    work.mkdir(exist_ok=True)
    told = {"folder": str(work), "steps": 12, "at": 5, "device": "n1/0", "kind": "persistent", "rank": 2, **conf}
    for node in nodes:
        job.start(node, script=[str(WORKER), json.dumps(told)], env=(env or {}).get(node))
    return job


def finished(job: Cluster, code: int = 0) -> None:
    for node in job.all:
        assert node.wait() in (code, 0), job.story()
    assert job.verdict()["exit_code"] == code, job.story()


def rules(job: Cluster) -> list[tuple[int, str]]:
    return [(e["rule"], e["decision"]) for e in job.decisions()]


def placements(job: Cluster) -> dict[int, dict[str, Any]]:
    return {e["job"]["cycle"]: e["job"]["placement"] for e in job.journal("job") if e["job"]["phase"] == "running"}


def devices(job: Cluster) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((job.folder / "ft_state.json").read_text())["hardware"]
    return found


def test_the_spare_takes_the_suspects_node_and_the_first_device_is_quarantined(make: Make) -> None:  # noqa: F811
    job = make(nproc=2, nnodes=2)
    gate = job.folder / "gate"
    begin(job, "n0", "n1", gate=str(gate))
    job.until(lambda: (job.stored("job") or {}).get("phase") == "running", "the first cycle")
    begin(job, "n2", gate=str(gate))
    job.until(lambda: (job.stored("reports/n2") or {}).get("standby"), "a spare")
    gate.touch()
    finished(job)
    assert placements(job)[1] == {"nodes": ["n0", "n2"], "nproc": 2, "slots": {}}
    assert placements(job)[2] == placements(job)[1], "the job goes on where it is"
    assert rules(job) == [(3, "replace"), (4, "restart"), (6, "finish")]
    assert devices(job)["n1/0"]["quarantine_until"] is not None
    assert [d for d, entry in devices(job).items() if entry["quarantine_until"]] == ["n1/0"]


def test_without_a_spare_the_suspect_changes_slots_on_its_own_node(make: Make) -> None:  # noqa: F811
    job = begin(make(nproc=2, nnodes=2), "n0", "n1")
    finished(job)
    assert placements(job)[1] == {"nodes": ["n0", "n1"], "nproc": 2, "slots": {"n1": [1, 0]}}
    assert rules(job) == [(3, "restart"), (4, "restart"), (6, "finish")]


def test_a_device_in_quarantine_is_known_again_under_another_node_id(make: Make) -> None:  # noqa: F811
    names = {"n0": "A0,A1", "n1": "B0,B1", "n2": "C0,C1"}
    env = {node: {"FT_DEVICES": text} for node, text in names.items()}
    job = begin(make(nproc=2, nnodes=2), "n0", "n1", env=env)
    finished(job)
    assert devices(job)["n1/0"]["device"] == "B0"
    later = make(nproc=2, nnodes=2, run_id=f"{job.run_id}-later")
    (later.folder / "ft_state.json").write_text((job.folder / "ft_state.json").read_text())
    begin(later, "n5", env={"n5": {"FT_DEVICES": "B0,B1"}}, device="none")
    begin(later, "n0", env=env, device="none")
    later.until_said(later.leader(), "with devices in quarantine: n5")
    begin(later, "n2", env=env, device="none")
    finished(later)
    assert sorted(placements(later)[0]["nodes"]) == ["n0", "n2"]
