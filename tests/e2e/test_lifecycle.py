"""Whole jobs with real processes: they finish, crash, recover, give up, and say why."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import Launcher
from tests.e2e.launch import alive, gone


def steps_of(marks: Path, rank: int) -> list[tuple[int, int]]:
    return [(int(c), int(i)) for c, i in (s.split(":") for s in (marks / f"steps.{rank}").read_text().split())]


def test_a_job_finishes(launch: Launcher, marks: Path) -> None:
    job = launch(steps=3)
    assert job.wait() == 0, job.said()
    assert job.verdict() == {"outcome": "finished", "exit_code": 0, "reason": "all ranks finished", "cycles": 1, "first_cause": None}
    assert sorted(p.name for p in (job.run_folder / "cycle_0000").iterdir()) == [f"rank_0000{r}.log" for r in range(4)]
    assert "rank 2 is done" in (job.run_folder / "cycle_0000" / "rank_00002.log").read_text()
    assert "[r2] rank 2 is done" in job.out.read_text()
    assert "4 ranks = tp 2 x cp 1 x dp 2 x pp 1" in job.said()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_killed_rank_is_noticed_all_restart_in_place_and_the_job_finishes(launch: Launcher, marks: Path, method: str) -> None:
    job = launch("--start-method", method, steps=20, resume=True, plan=[{"rank": 2, "cycle": 0, "at": 5, "do": "signal", "value": 9}])
    assert job.wait() == 0, job.said()
    assert "rank 2 (tp=0,cp=0,dp=1,pp=0; node" in job.said()
    assert "was killed by SIGKILL" in job.said()
    for rank in range(4):
        assert steps_of(marks, rank)[-1] == (1, 19), "every rank ended in cycle 1"
    (incident,) = job.incidents()
    assert incident["cause"] == "crash"
    assert incident["culprit"]["rank"] == 2
    assert incident["culprit"]["coords"] == {"tp": 0, "cp": 0, "dp": 1, "pp": 0}
    assert incident["ranks"]["2"]["exit"] == -9
    assert incident["ranks"]["2"]["iteration"] == 5
    assert "restart 1 of 3" in incident["reason"]


def test_the_environment_of_a_rank(launch: Launcher, tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(
        "import json, os\nprint(json.dumps(dict(os.environ)))\nif os.environ['FT_CYCLE'] == '0' and os.environ['RANK'] == '3': os._exit(3)\n"
    )
    job = launch("--run-id", "job-7", script=[str(script)])
    assert job.wait() == 0, job.said()
    logs = [job.run_folder / f"cycle_000{cycle}" / "rank_00003.log" for cycle in (0, 1)]
    seen = [json.loads(next(x for x in log.read_text().splitlines() if x.startswith("{"))) for log in logs]
    last = seen[-1]
    expected = {
        "RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4", "ROLE_NAME": "default", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "job-7", "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "3", "FT_RUN_ID": "job-7", "FT_CYCLE": "1", "FT_SLOT": "3", "FT_COORDS": "tp=1,cp=0,dp=1,pp=0",
    }  # fmt: skip
    assert {k: last[k] for k in expected} == expected
    assert last["FT_SECTION_PAGE"].startswith("/proc/self/fd/")
    assert "exited with code 3" in last["FT_RESTART_REASON"]
    assert last["TORCHELASTIC_ERROR_FILE"].endswith("rank_00003.error.json")
    ports = {(e["FT_CYCLE"], e["MASTER_PORT"]) for e in seen}
    assert len({port for _, port in ports}) == 2, "a fresh store for each cycle"


def test_a_rank_that_leaves_with_0_while_others_work_is_named(launch: Launcher) -> None:
    lost = "Connection closed by peer [10.0.0.7]:34561"
    plan = [{"rank": 2, "cycle": 0, "at": 5, "do": "exit", "value": 0}]
    plan += [{"rank": rank, "cycle": 0, "at": 9, "do": "raise", "value": lost} for rank in (0, 1, 3)]
    job = launch(steps=20, step_s=0.05, resume=True, plan=plan)
    assert job.wait() == 0, job.said()
    (incident,) = job.incidents()
    assert incident["culprit"]["rank"] == 2
    said = r"slot 2\) left with exit 0 at iteration 5 while others were at work; [123] other ranks? failed because of it, first rank [013] "
    assert re.search(said, incident["reason"]), incident["reason"]
    assert incident["ranks"]["2"]["exit"] == 0


FENCED = """
import os, sys, time
from pathlib import Path
from monitors.client import attach
from monitors.fence import CheckpointFence
folder, mon = Path(sys.argv[1]), attach()
if os.environ['RANK'] == '0':
    fence = CheckpointFence.claim(folder, lambda name: True)
    if os.environ['FT_CYCLE'] == '0' and len(sys.argv) > 2:  # a rank that woke up late has claimed last: of this run, or of another
        os.environ['FT_RUN_ID'] = sys.argv[2]
        CheckpointFence.claim(folder, lambda name: True)
    for i in range(3):
        with mon.section('step', iteration=i):
            time.sleep(0.05)
        fence.commit(f'step_{i}')
"""


@pytest.mark.parametrize(("claimed_by", "code", "cycles"), [("mine", 0, 2), ("other", 1, 1)])
def test_a_lost_fence_ends_the_job_only_where_another_run_has_the_folder(
    launch: Launcher, tmp_path: Path, claimed_by: str, code: int, cycles: int
) -> None:
    script = tmp_path / "fenced.py"
    script.write_text(FENCED)
    job = launch("--run-id", "mine", script=[str(script), str(tmp_path / "checkpoints"), claimed_by])
    assert job.wait() == code, job.said()
    verdict = job.verdict()
    assert verdict["cycles"] == cycles
    assert ("run other has taken the checkpoint folder" in verdict["reason"]) == (claimed_by == "other")
    assert "FenceLost: fence 1 is superseded by fence 2 of run " in job.said()


def test_launches_that_share_the_state_file_are_warned_each(launch: Launcher, tmp_path: Path, marks: Path) -> None:
    state, forever = ("--ft-state", str(tmp_path / "shared.json")), {"steps": 100_000, "step_s": 0.05}
    first = launch("--run-id", "one", *state, **forever)
    first.wait_for(lambda: (tmp_path / "shared.json").exists(), "a state")
    second = launch("--run-id", "two", *state, **forever)
    second.wait_for(lambda: "run one has written here within the last 30 s and has not ended" in second.said(), "a word to the second")
    first.wait_for(lambda: "run two has written here within the last 30 s and has not ended" in first.said(), "a word to the first")
    second.process.send_signal(signal.SIGTERM)
    assert second.wait() == 143, second.said()
    assert second.said().count("has written here") == 1


def test_a_misspelt_section_is_said_once_by_one_rank(launch: Launcher, tmp_path: Path) -> None:
    script = tmp_path / "slip.py"
    script.write_text(
        "import sys, time\nfrom pathlib import Path\nfrom monitors.client import attach\nmon = attach()\n"
        "while not Path(sys.argv[1]).exists():\n    with mon.section('steps'):\n        time.sleep(0.05)\n"
    )
    enough = tmp_path / "enough"
    job = launch(script=[str(script), str(enough)])
    job.wait_for(lambda: "uses a section 'steps'" in job.said(), "a word about the section")
    enough.touch()
    assert job.wait() == 0, job.said()
    assert job.said().count("uses a section") == 1


def test_a_misspelt_section_of_a_short_life_is_said_at_its_end(launch: Launcher, tmp_path: Path) -> None:
    script = tmp_path / "slip.py"
    script.write_text("from monitors.client import attach\nwith attach().section('steps'):\n    pass\n")
    job = launch(script=[str(script)])
    assert job.wait() == 0, job.said()
    assert job.said().count("uses a section 'steps'") == 1


@pytest.mark.parametrize(
    ("do", "value", "code"),
    [("exit", 7, 7), ("signal", 11, 139), ("exit", 75, 1), ("exit", 93, 1), ("exit", 16, 16), ("exit", 17, 17), ("raise", "boom", 1)],
)
def test_exit_codes(launch: Launcher, do: str, value: object, code: int) -> None:
    job = launch("--max-restarts", "0", plan=[{"rank": 1, "at": 3, "do": do, "value": value}])
    assert job.wait() == code, job.said()
    verdict = job.verdict()
    assert verdict["exit_code"] == code
    assert verdict["first_cause"]["rank"] == 1
    assert verdict["first_cause"]["coords"] == {"tp": 1, "cp": 0, "dp": 0, "pp": 0}
    assert ("--max-restarts 0 allows no restart" in verdict["reason"]) == (code not in {16, 17})
    if do == "raise":
        assert "ValueError: boom" in verdict["reason"]
        assert verdict["first_cause"]["error"]["message"] == "ValueError: boom"
        assert "Traceback" in verdict["first_cause"]["error"]["traceback"]


def test_an_exception_ends_the_job_in_one_sentence(launch: Launcher) -> None:
    job = launch("--max-restarts", "1", plan=[{"rank": 3, "at": 2, "do": "raise", "value": "bad number"}])
    assert job.wait() == 1
    assert "rank 3 (tp=1,cp=0,dp=1,pp=0; node" in job.verdict()["reason"]
    assert "exited with code 1 (ValueError: bad number)" in job.verdict()["reason"]
    assert "--max-restarts 1 is used up" in job.verdict()["reason"]
    assert job.verdict()["cycles"] == 2


def test_no_progress_is_93(launch: Launcher) -> None:
    job = launch("--max-restarts", "20", "--no-progress-cycles", "2", plan=[{"rank": 0, "at": 2, "do": "exit", "value": 5}])
    assert job.wait() == 93, job.said()
    said = job.verdict()["reason"]  # the other ranks, who do not wait for rank 0, may not have begun iteration 2 when it left
    assert re.match(r"no progress: 2 cycles in a row without going beyond iteration [12];", said), said


@pytest.mark.parametrize(
    "text",
    [
        "import nothing_of_this_name\n",
        "def f(:\n",
        "open('/nowhere/at/all')\n",
        "import argparse; argparse.ArgumentParser().parse_args(['--x'])\n",
    ],
)
def test_a_bad_start_burns_no_restarts(launch: Launcher, tmp_path: Path, text: str) -> None:
    script = tmp_path / "bad.py"
    script.write_text(text)
    job = launch(script=[str(script)])
    assert job.wait() in (1, 2)
    assert job.verdict()["cycles"] == 1
    assert "bad start" in job.verdict()["reason"]


def test_a_hung_rank_is_ended_and_the_job_restarted(launch: Launcher, marks: Path) -> None:
    job = launch("--timeouts", "step=1", resume=True, plan=[{"rank": 1, "cycle": 0, "at": 4, "do": "hang"}])
    assert job.wait() == 0, job.said()
    (incident,) = job.incidents()
    assert (incident["cause"], incident["culprit"]["rank"]) == ("hang", 1)
    assert incident["ranks"]["1"]["section"] == "step"
    assert steps_of(marks, 1)[-1] == (1, 19)


def test_a_stopped_rank_is_a_hang_too(launch: Launcher) -> None:
    job = launch("--timeouts", "step=1", resume=True, plan=[{"rank": 3, "cycle": 0, "at": 4, "do": "stop"}])
    assert job.wait() == 0, job.said()
    assert job.incidents()[0]["culprit"]["rank"] == 3


def test_hang_action_log_only_says_it(launch: Launcher) -> None:
    job = launch("--timeouts", "step=0.5", "--hang-action", "log", plan=[{"rank": 3, "at": 4, "do": "sleep", "value": 2}])
    assert job.wait() == 0, job.said()
    (line,) = [line for line in job.said().splitlines() if "only said, --hang-action log" in line]
    assert re.search(r"warning: rank 3 \(tp=1,cp=0,dp=1,pp=0; node \S+ slot 3\) hangs: ", line), "whose hang it is, as before a restart"
    assert job.verdict()["cycles"] == 1


def test_without_a_client_silence_is_no_hang(launch: Launcher) -> None:
    job = launch(
        "--timeouts",
        "setup=0.5,step=0.5",
        "--out-of-section",
        "0.5",
        client=False,
        steps=3,
        plan=[{"rank": 1, "at": 1, "do": "sleep", "value": 2}],
    )
    assert job.wait() == 0, job.said()


def test_stragglers_get_their_grace_and_the_job_succeeds(launch: Launcher) -> None:
    job = launch("--exit-grace", "1", steps=3, plan=[{"rank": 2, "at": "end", "do": "hang"}])
    assert job.wait() == 0, job.said()
    assert "rank 2, which had not left after 1 s without a step or a section, was ended" in job.verdict()["reason"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stop_signal_drains(launch: Launcher, marks: Path, number: int, code: int) -> None:
    job = launch(steps=10_000, plan=[{"at": 2, "do": "leave_on_term", "value": 0}] if number == signal.SIGTERM else [])
    job.wait_mark(marks, "leave_on_term.*" if number == signal.SIGTERM else "steps.*", 4)
    job.process.send_signal(number)
    assert job.wait() == code, job.said()
    assert job.verdict()["outcome"] == "stopped"
    if number == signal.SIGTERM:
        assert len(list(marks.glob("got_term.*"))) == 4


def test_a_second_signal_shortens_the_grace(launch: Launcher, marks: Path) -> None:
    job = launch("--term-grace", "1000", steps=10_000, plan=[{"at": 2, "do": "ignore_term"}])
    job.wait_mark(marks, "ignore_term.*", 4)
    job.process.send_signal(signal.SIGTERM)
    job.wait_for(lambda: "passed on to all ranks" in job.said(), "the first signal")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 143, job.said()


def test_other_signals_are_forwarded_once_to_each_rank(launch: Launcher, marks: Path) -> None:
    job = launch("--forward-signals", "USR1", steps=150, plan=[{"at": 2, "do": "count_usr1"}])
    job.wait_mark(marks, "count_usr1.*", 4)
    job.process.send_signal(signal.SIGUSR1)
    assert job.wait() == 0, job.said()
    assert [(marks / f"usr1.{rank}").read_text() for rank in range(4)] == ["x"] * 4


def test_children_of_ranks_do_not_survive_a_cycle(launch: Launcher, marks: Path) -> None:
    job = launch(
        resume=True,
        steps=20,
        plan=[{"rank": 1, "cycle": 0, "at": 3, "do": "orphans"}, {"rank": 0, "cycle": 0, "at": 19, "do": "exit", "value": 4}],
    )
    job.wait_mark(marks, "begin.1.1")
    orphans = [int(p.suffix[1:]) for p in marks.glob("orphan.*")]
    assert len(orphans) == 3
    assert not [p for p in orphans if alive(p)], "cleared before the next cycle began"
    assert job.wait() == 0, job.said()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_whatever_kills_the_agent_nothing_is_left(launch: Launcher, marks: Path, number: int) -> None:
    job = launch("--term-grace", "0.5", steps=10_000, plan=[{"rank": 1, "at": 3, "do": "orphans"}])
    job.wait_mark(marks, "orphans.*")
    job.wait_mark(marks, "orphan.*", 3)
    pids = [p.pid for p in job.below()] + [int(p.suffix[1:]) for p in marks.glob("orphan.*")]
    assert len(pids) >= 8
    job.process.send_signal(number)
    job.wait()
    assert gone(pids), [p for p in pids if alive(p)]


def test_a_killed_zygote_costs_no_restart(launch: Launcher, marks: Path) -> None:
    job = launch("--max-restarts", "0", resume=True, steps=50, step_s=0.05)
    job.wait_mark(marks, "steps.*", 4)
    os.kill(job.zygote_pid(), signal.SIGKILL)
    assert job.wait() == 0, job.said()
    assert "platform fault 1 of 3" in job.said()
    assert job.verdict()["cycles"] == 2


def test_a_stopped_zygote_is_replaced(launch: Launcher, marks: Path) -> None:
    job = launch("--max-restarts", "0", resume=True, steps=100, step_s=0.05)
    job.wait_mark(marks, "steps.*", 4)
    os.kill(job.zygote_pid(), signal.SIGSTOP)
    assert job.wait() == 0, job.said()
    assert "has not answered for" in job.said()


def test_a_paused_agent_kills_nobody(launch: Launcher, marks: Path) -> None:
    job = launch("--timeouts", "step=1", steps=100, step_s=0.05)
    job.wait_mark(marks, "steps.*", 4)
    os.kill(job.process.pid, signal.SIGSTOP)
    job_steps = marks / "steps.0"
    before = len(job_steps.read_text().split())
    job.wait_for(lambda: len(job_steps.read_text().split()) > before + 40, "training going on alone")
    os.kill(job.process.pid, signal.SIGCONT)
    assert job.wait() == 0, job.said()
    assert job.verdict()["cycles"] == 1


def test_ft_state_tells_the_story(launch: Launcher) -> None:
    job = launch("--run-id", "story", resume=True, plan=[{"rank": 2, "cycle": 0, "at": 5, "do": "signal", "value": 9}])
    assert job.wait() == 0
    state = json.loads((job.folder / "ft_logs" / "ft_state.json").read_text())
    assert state["schema"] == "ft-state/1"
    assert state["run"]["id"] == "story"
    assert state["run"]["outcome"] == "finished"
    assert [c["cause"] for c in state["cycles"]] == ["crash", "finished"]
    assert state["cycles"][0]["culprit"]["rank"] == 2
    assert state["cycles"][1]["recovery_s"] > 0
    assert state["budgets"]["restarts"] == {"used": 1, "limit": 3}


def test_a_cycle_that_ends_before_its_first_steps_has_not_recovered(launch: Launcher) -> None:
    """All its ranks were there, but dashboards must not take that for training."""
    plan = [{"rank": 2, "cycle": 0, "at": 5, "do": "signal", "value": 9}, {"rank": 2, "cycle": 1, "after": 0, "do": "exit", "value": 3}]
    job = launch(resume=True, plan=plan)
    assert job.wait() == 0, job.said()
    assert len(list(job.events("restarted"))) == 2, "both times all ranks were started"
    cycles = json.loads((job.folder / "ft_logs" / "ft_state.json").read_text())["cycles"]
    assert [c["recovery_s"] is None for c in cycles] == [True, True, False]


def test_two_launches_side_by_side_do_not_meet(launch: Launcher) -> None:
    one, two = launch(steps=50), launch(steps=50, plan=[{"rank": 0, "cycle": 0, "at": 10, "do": "signal", "value": 9}], resume=False)
    assert one.wait() == 0
    assert two.wait() == 0
    assert one.verdict()["cycles"] == 1
