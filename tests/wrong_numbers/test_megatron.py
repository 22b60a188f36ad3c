"""The whole story with a real Megatron-core GPT: a device spoils gradients, the launcher moves the rank, the verdict is acted upon, and the losses are those of a clean run.

On one node the suspect changes slots; on two nodes a spare takes the suspect's. Both with this project's machine and with Megatron's own, unmodified one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.launch import Launch
from tests.multinode.cluster import Cluster
from tests.multinode.conftest import make, shared_etcd  # noqa: F401 - fixtures

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "megatron_gpt"
sys.path.insert(0, str(EXAMPLE))
from options import PRELOAD  # noqa: E402

SIZES = [
    "--num-layers",
    "2",
    "--hidden-size",
    "32",
    "--num-attention-heads",
    "4",
    "--seq-length",
    "32",
    "--micro-batch-size",
    "2",
    "--global-batch-size",
    "4",
]
SIZES += ["--eval-interval", "0", "--sample-bytes", "0", "--train-iters", "12", "--save-interval", "4"]
TOPOLOGY = ("--tp", "2", "--pp", "2", "--preload", PRELOAD, "--tee", "none")
ENV = {"GLOO_SOCKET_IFNAME": "lo"}
PATIENT = """
import os, runpy, sys, time

while not os.path.exists({gate!r}):
    time.sleep(0.05)
sys.path.insert(0, {example!r})
runpy.run_path({example!r} + "/train.py", run_name="__main__")
"""


def script(folder: Path, *extra: str) -> list[str]:
    return [str(EXAMPLE / "train.py"), *SIZES, "--save", str(folder / "save"), "--log", str(folder / "log.jsonl"), *extra]


def losses(folder: Path) -> dict[int, str]:
    """Iteration -> loss, exact; an iteration that was repeated must repeat its loss."""
    found: dict[int, str] = {}
    for line in (folder / "log.jsonl").read_text().splitlines():
        entry = json.loads(line)
        loss = str(entry.get("loss_hex", entry["loss"]))
        assert found.setdefault(entry["iteration"], loss) == loss, f"iteration {entry['iteration']} was not repeated exactly"
    return found


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., Launch]]:
    """`start(folder, *script options)`: four ranks on node n0."""
    started: list[Launch] = []

    def build(folder: Path, *extra: str) -> Launch:
        folder.mkdir()
        job = Launch(folder, "--nproc-per-node", "4", "--node-id", "n0", *TOPOLOGY, script=script(folder, *extra), env=ENV)
        started.append(job)
        return job

    yield build
    for job in started:
        job.kill()


@pytest.fixture(scope="module")
def clean(start: Callable[..., Launch], tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The losses of a run that nothing happens to."""
    folder = tmp_path_factory.mktemp("clean") / "run"
    job = start(folder)
    assert job.wait(240) == 0, job.said()
    return losses(folder)


def decided(job: Launch) -> list[tuple[int, str]]:
    return [(e["rule"], e["cause"]) for e in job.events("decision")]


@pytest.mark.parametrize("machine", ["ours", "megatron"])
def test_persistent_fault_on_one_node(start: Callable[..., Launch], clean: dict[int, str], tmp_path: Path, machine: str) -> None:
    job = start(tmp_path / "run", "--rerun", machine, "--inject", "persistent", "--at", "6", "--on", "1")
    assert job.wait(240) == 0, job.said()
    assert decided(job) == [(3, "rerun"), (4, "persistent fault"), (6, "finished")]
    assert "rank 1 moves to slot" in job.said()
    assert "n0/1 is quarantined" in job.said()
    assert losses(tmp_path / "run") == clean


def test_transient_fault_restarts_in_place(start: Callable[..., Launch], clean: dict[int, str], tmp_path: Path) -> None:
    job = start(tmp_path / "run", "--rerun", "ours", "--inject", "transient", "--at", "6", "--on", "2")
    assert job.wait(240) == 0, job.said()
    assert decided(job) == [(4, "transient fault"), (6, "finished")]
    assert losses(tmp_path / "run") == clean


def test_a_mistake_of_the_program_is_17(start: Callable[..., Launch], tmp_path: Path) -> None:
    job = start(tmp_path / "run", "--rerun", "ours", "--inject", "application", "--at", "6", "--on", "3")
    assert job.wait(240) == 17, job.said()
    assert decided(job) == [(3, "rerun"), (4, "result rejected")]
    assert "the application is the cause" in job.verdict()["reason"]


def test_megatrons_own_error_injector_drives_it(start: Callable[..., Launch], tmp_path: Path) -> None:
    """It draws from the checkpointed generator and so strikes again and again; each time another device decides, within the bound."""
    job = start(tmp_path / "run", "--rerun", "megatron", "--error-injection-rate", "10", "--error-injection-type", "persistent_error")
    assert job.wait(280) in (0, 16), job.said()
    rules = [rule for rule, cause in decided(job)]
    assert rules[0] == 3, rules
    assert {cause for rule, cause in decided(job)} <= {"rerun", "persistent fault", "finished"}, decided(job)
    state = json.loads((tmp_path / "run" / "ft_logs" / "ft_state.json").read_text())
    assert state["budgets"]["restarts"]["used"] == 0
    assert state["budgets"]["reruns"]["used"] <= 11


def test_a_spare_takes_the_place_of_the_suspects_node(make: Callable[..., Cluster], clean: dict[int, str], tmp_path: Path) -> None:  # noqa: F811
    """Megatron's own machine, two nodes and a spare."""
    job = make(nproc=2, nnodes=2, ttl_s=10)
    gate = tmp_path / "gate"
    patient = tmp_path / "train.py"
    patient.write_text(PATIENT.format(gate=str(gate), example=str(EXAMPLE)))
    told = [str(patient), *script(job.folder, "--rerun", "megatron", "--inject", "persistent", "--at", "6", "--on", "3")[1:]]
    job.start("n0", "n1", "n2", script=told, options=TOPOLOGY, env=ENV, torch=True)
    holders: list[str] = job.until(lambda: ((job.stored("job") or {}).get("placement") or {}).get("nodes"), "the first cycle")
    (spare,) = {"n0", "n1", "n2"} - set(holders)
    job.until(lambda: (job.stored(f"reports/{spare}") or {}).get("standby"), "the spare is ready")
    gate.touch()
    for node in job.all:
        assert node.wait(240) == 0, job.story()
    assert [d["rule"] for d in job.decisions()] == [3, 4, 6]
    final = job.stored("job")
    assert final is not None
    assert final["placement"]["nodes"] == [holders[0], spare]
    assert losses(job.folder) == clean
