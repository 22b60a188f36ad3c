"""The job script of examples/slurm from submission to end, against a stand-in for Slurm; the launcher itself is a stand-in but for the last tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.conftest import JOB, Slurm

pytestmark = pytest.mark.serial


def named(node: str, slot: int = 0) -> dict[str, object]:
    return {"first_cause": {"rank": 3, "coords": {"tp": 1}, "node": node, "slot": slot, "cause": "rerun", "exit": 16, "error": None}}


def test_a_job_that_is_done_is_left_alone(slurm: Slurm) -> None:
    code, said = slurm.submit([])
    assert code == 0, said
    assert slurm.orders() == []
    assert slurm.job()["starts"] == 1


def test_what_slurm_knows_is_what_the_agents_get(slurm: Slurm) -> None:
    code, said = slurm.submit([], "--tp", "2", "my train.py", "--data", "a b")
    assert code == 0, said
    for i, agent in enumerate(sorted(slurm.agents(), key=lambda a: a["order"])):
        assert (agent["node"], agent["order"]) == (f"n{i + 1}", str(i))
        assert agent["args"] == ["--node-id", f"n{i + 1}", "--nnodes", "2:3", "--tp", "2", "my train.py", "--data", "a b"]
    (step,) = slurm.calls("srun")
    assert {"--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--ntasks-per-node=1", "--ntasks=3"} <= set(step)
    assert {"no-kill", "requeue", "signal"} <= set(slurm.job()["flags"])


def test_16_is_requeued_without_the_named_machine(slurm: Slurm) -> None:
    code, said = slurm.submit([{"code": 16, "verdict": named("n2")}])
    assert code == 0, said
    assert slurm.orders() == ["requeuehold 77", "update JobId=77 ExcNodeList=n2", "release 77"]
    assert {agent["node"] for agent in slurm.agents() if agent["start"] == 1} == {"n1", "n3", "n4"}
    assert "exit code 16: requeue 1 of at most 5 (as planned for start 0)" in said


def test_75_is_requeued_and_nobody_excluded(slurm: Slurm) -> None:
    code, said = slurm.submit([{"code": 75, "verdict": named("n2")}])
    assert code == 0, said
    assert slurm.orders() == ["requeue 77"]


@pytest.mark.parametrize("own", [2, 17, 93, 143])
def test_other_codes_end_the_job_with_that_code(slurm: Slurm, own: int) -> None:
    code, said = slurm.submit([{"code": own, "verdict": named("n2")}])
    assert code == own
    assert slurm.orders() == []
    assert f"exit code {own} is not requeued (as planned for start 0)" in said


def test_exclusions_accumulate_and_both_forms_of_a_verdict_are_read(slurm: Slurm) -> None:
    listed = {
        "exclude": [
            {"node": "n1", "slot": 2, "device": "GPU-1", "why": "persistent"},
            {"node": "n4", "slot": 0, "device": None, "why": "x"},
        ],
        "first_cause": None,
    }
    code, said = slurm.submit(
        [{"code": 16, "verdict": named("n2")}, {"code": 16, "verdict": {**listed, **named("n3")}}, {"code": 75}],
        FAKE_SLURM_NODES="2",
        SPARES="0",
    )
    assert code == 0, said
    updates = [order for order in slurm.orders() if order.startswith("update")]
    assert updates == ["update JobId=77 ExcNodeList=n2", "update JobId=77 ExcNodeList=n2,n1,n3"], said
    assert slurm.orders()[-1] == "requeue 77"
    assert {agent["node"] for agent in slurm.agents() if agent["start"] == 2} == {"n4", "n5"}


def test_what_the_job_excluded_from_its_beginning_stays_excluded(slurm: Slurm) -> None:
    script = slurm.folder / "job with spaces.sh"
    script.write_text(
        JOB.read_text().replace(
            "set -uo pipefail", 'set -uo pipefail\nflock "$FAKE_SLURM/lock" sed -i \'s/"exc": ""/"exc": "n[5-6]"/\' "$FAKE_SLURM/job.json"'
        )
    )
    script.chmod(0o755)
    code, said = slurm.submit([{"code": 16, "verdict": named("n1")}], script=script, FAKE_SLURM_NAME="a job of mine")
    assert code == 0, said
    assert "update JobId=77 ExcNodeList=n[5-6],n1" in slurm.orders()
    assert {agent["node"] for agent in slurm.agents() if agent["start"] == 1} == {"n2", "n3", "n4"}


def test_requeues_are_bounded(slurm: Slurm) -> None:
    code, said = slurm.submit([{"code": 75}] * 9, REQUEUES="3")
    assert code == 75
    assert slurm.job()["starts"] == 4
    assert "the job has been requeued 3 times, the most that was allowed" in said


def test_a_machine_that_slurm_does_not_know_by_that_name_is_said_and_not_asked_for(slurm: Slurm) -> None:
    code, said = slurm.submit([{"code": 16, "verdict": named("n2.cluster.example")}])
    assert code == 0, said
    assert slurm.orders() == ["requeue 77"]
    assert "not excluded, for the job has no node of that name: n2.cluster.example" in said


def test_the_verdict_counts_and_not_the_code_of_an_agent_that_was_lost(slurm: Slurm) -> None:
    code, said = slurm.submit([{"code": 16, "verdict": named("n3"), "own": {"n1": 137}}, {"code": 0, "own": {"n1": 137}}])
    assert code == 0, said
    assert slurm.job()["starts"] == 2
    assert slurm.orders()[1] == "update JobId=77 ExcNodeList=n3"


def test_an_old_verdict_is_not_this_launchs(slurm: Slurm) -> None:
    """The second start fails before it has a folder: what the first one's verdict says is over."""
    code, said = slurm.submit([{"code": 16, "verdict": named("n2")}, {"code": 2, "verdict": None}])
    assert code == 2
    assert slurm.job()["starts"] == 2
    assert "exit code 2 is not requeued (this launch left no verdict.json)" in said


def test_where_nothing_can_be_excluded_the_job_is_released_all_the_same(slurm: Slurm) -> None:
    code, said = slurm.submit([{"code": 16, "verdict": named("n2")}], FAKE_SLURM_FAILS="update")
    assert code == 0, said
    assert slurm.job()["starts"] == 2
    assert "nothing is excluded: scontrol update JobId=77 ExcNodeList=n2: slurm_update error: Unable to contact slurm controller" in said


def test_a_controller_that_does_not_answer_leaves_the_jobs_own_code(slurm: Slurm) -> None:
    code, said = slurm.submit([{"code": 16, "verdict": named("n2")}], FAKE_SLURM_FAILS="requeuehold")
    assert code == 16
    assert "the job is not requeued: scontrol requeuehold 77" in said


def test_a_job_that_stays_held_is_said(slurm: Slurm) -> None:
    _, said = slurm.submit([{"code": 16, "verdict": named("n2")}], FAKE_SLURM_FAILS="release")
    assert (
        "the job stays held: scontrol release 77: slurm_update error: Unable to contact slurm controller (connect failure); release it with: scontrol release 77"
        in said
    )


def test_without_scontrol_it_is_one_line(slurm: Slurm) -> None:
    environment = {**slurm.environment([]), "PATH": "/nowhere", "SLURM_JOB_ID": "1"}
    slurm.logs.mkdir()
    words = [
        sys.executable,
        "-m",
        "ft_launcher.integrations.slurm",
        "after-run",
        "--code",
        "75",
        "--newer-than",
        "-1",
        "--log-dir",
        str(slurm.logs),
    ]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 75
    assert done.stderr.splitlines()[-1] == "ft-launch (slurm): the job is not requeued: scontrol requeue 1: No such file or directory"


def test_a_job_on_several_nodes_without_a_store_says_so_at_once(slurm: Slurm) -> None:
    code, said = slurm.submit([], FT_STORE="")
    assert code == 2
    assert "FT_STORE is not set" in said
    assert slurm.calls("srun") == []


def test_srun_would_end_the_step_without_those_options(slurm: Slurm, tmp_path: Path) -> None:
    """That the stand-in can end a job: a task that is lost takes the others along, which is what the job script's options forbid."""
    script = tmp_path / "plain.sh"
    killed = (
        'if [ "$SLURM_NODEID" = 0 ]; then kill -KILL $$; fi; for i in $(seq 3000); do [ -e "$FAKE_SLURM/go" ] && exit 0; sleep 0.02; done'
    )
    script.write_text(f"#!/bin/bash\n#SBATCH --job-name=plain\n#SBATCH --nodes=2\nsrun bash -c '{killed}'\n")
    script.chmod(0o755)
    code, said = slurm.submit([], script=script)
    assert code == 137
    assert "srun: the step is ended (a node failed)" in said
    assert os.path.exists(slurm.state / "task.n2.pid")
