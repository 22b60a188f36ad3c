"""The job script with the real launcher on two nodes and a spare, over a real etcd: srun must not end the job when an agent is lost."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integrations.conftest import PATIENCE_S, Slurm
from tests.store.etcd_server import EtcdServer

WORKER = Path(__file__).resolve().parent.parent / "multinode" / "worker.py"
NO_TORCH = WORKER.with_name("notorch")
pytestmark = pytest.mark.serial


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path)
    try:
        yield server.start()
    finally:
        server.kill()


def until(what: Callable[[], bool], why: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, f"{why} did not come"
        time.sleep(0.05)


def test_a_lost_agent_does_not_end_the_job(slurm: Slurm, etcd: EtcdServer, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    host, port = etcd.endpoint
    conf = {"steps": 100_000, "marks": str(marks), "step_s": 0.02, "until": str(marks / "enough")}
    options = ["--preload", "json", "--node-ttl", "2", "--tee", "none", "--nproc-per-node", "1"]
    path = os.pathsep.join([str(NO_TORCH), str(NO_TORCH.parent.parent.parent)])
    job = slurm.begin([], *options, str(WORKER), json.dumps(conf), PYTHON=sys.executable, PYTHONPATH=path, FT_STORE=f"etcd://{host}:{port}")

    def steps(cycle: int) -> bool:
        return (
            all(f"{cycle}:" in (marks / f"steps.{rank}").read_text() for rank in (0, 1) if (marks / f"steps.{rank}").exists())
            and (marks / "steps.1").exists()
        )

    until(lambda: steps(0) or job.poll() is not None, "a step of all ranks")
    holders = {entry["rank"]: entry["node"] for entry in map(json.loads, (marks / "life.jsonl").read_text().splitlines())}
    os.kill(int((slurm.state / f"task.{holders[1]}.pid").read_text()), signal.SIGKILL)
    until(lambda: steps(1) or job.poll() is not None, "a step after the loss")
    (marks / "enough").touch()
    said, _ = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 0, said
    assert "the job is done" in said
    verdict = json.loads((slurm.logs / "77.0" / "verdict.json").read_text())
    assert (verdict["outcome"], verdict["exit_code"]) == ("finished", 0), said
    assert slurm.orders() == []
    placed = [entry for entry in map(json.loads, (marks / "life.jsonl").read_text().splitlines()) if entry["cycle"] == 1]
    assert {entry["node"] for entry in placed} == {"n1", "n2", "n3"} - {holders[1]}, (
        "Slurm's names are the node ids, and the spare has taken the place"
    )


SAVES = """\
import os, signal, sys, time
from pathlib import Path
marks = Path(sys.argv[1])
def note(number, frame):
    with (marks / f"{signal.Signals(number).name}.{os.environ['RANK']}").open("a") as file:
        file.write("x")
    if number == signal.SIGTERM:
        sys.exit(0)
signal.signal(signal.SIGUSR1, note)
signal.signal(signal.SIGTERM, note)
(marks / f"ready.{os.environ['RANK']}").touch()
while True:
    time.sleep(0.05)
"""


def test_pre_emption_usr1_then_term(slurm: Slurm, tmp_path: Path) -> None:
    """As `#SBATCH --signal=USR1@120` does it: both signals go to each task of the step, the second ends the job, and Slurm requeues what it has pre-empted by itself."""
    marks = tmp_path / "marks"
    marks.mkdir()
    script = tmp_path / "saves.py"
    script.write_text(SAVES)
    options = ["--preload", "json", "--tee", "none", "--nproc-per-node", "2"]
    path = os.pathsep.join([str(NO_TORCH), str(NO_TORCH.parent.parent.parent)])
    one_node = {"FAKE_SLURM_NODES": "1", "SPARES": "0", "FT_STORE": "memory", "PYTHON": sys.executable, "PYTHONPATH": path}
    job = slurm.begin([], *options, str(script), str(marks), **one_node)
    until(lambda: len(list(marks.glob("ready.*"))) == 2 or job.poll() is not None, "both ranks")
    agent = int((slurm.state / "task.n1.pid").read_text())
    os.killpg(agent, signal.SIGUSR1)
    until(lambda: len(list(marks.glob("SIGUSR1.*"))) == 2 or job.poll() is not None, "USR1 in both ranks")
    os.killpg(agent, signal.SIGTERM)
    said, _ = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 143, said
    assert {path.name: path.read_text() for path in marks.glob("SIG*")} == {
        f"SIG{name}.{rank}": "x" for name in ("USR1", "TERM") for rank in (0, 1)
    }, "each once"
    assert "exit code 143 is not requeued (stopped by SIGTERM)" in said
    assert slurm.orders() == []
