"""Megatron-Bridge's calls of NVRx's client, with the real client of the installed nvidia_resiliency_ext, under the launcher."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.e2e.launch import Launch

WORKER = Path(__file__).with_name("bridge_worker.py")
pytestmark = pytest.mark.serial


def test_the_calls_of_megatron_bridge_are_served_over_a_restart(tmp_path: Path) -> None:
    if importlib.util.find_spec("nvidia_resiliency_ext") is None:
        pytest.skip("nvidia_resiliency_ext is not installed")
    marks, checkpoints = tmp_path / "marks", tmp_path / "checkpoints"
    marks.mkdir()
    checkpoints.mkdir()
    options = [
        "--nproc-per-node",
        "2",
        "--preload",
        "torch,nvidia_resiliency_ext.fault_tolerance",
        "--tee",
        "none",
        "--timeouts",
        "setup=120,step=60",
    ]
    job = Launch(
        tmp_path,
        *options,
        script=[str(WORKER), str(marks), str(checkpoints)],
        env={"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"},
    )
    try:
        assert job.wait(120) == 0, job.said()
    finally:
        job.kill()
    (incident,) = job.incidents()
    assert incident["cause"] == "crash"
    assert not list(job.events("finding-hung")) and not list(job.events("finding-silent"))
    state = json.loads((checkpoints / "ft_state.json").read_text())["current_timeouts"]["section"]
    assert state["calculated_sections"] == ["step"]
    for rank in (0, 1):
        first, second = (json.loads((marks / f"limits.{rank}.{cycle}").read_text()) for cycle in (0, 1))
        assert first["step"] == 60.0, "the launcher's own"
        assert second["step"] == pytest.approx(first["step"], abs=60) and second["step"] < 60, (
            "what was calculated after the save, loaded again"
        )
        assert (marks / f"done.{rank}.1").exists()
