"""A node leaves and the job goes on: TERM to one agent, `ft-launch drain`, and what is refused. Several agents, a real etcd."""

from __future__ import annotations

import signal
import subprocess
import sys

from tests.multinode.cluster import SAVE_S, Cluster, gone
from tests.multinode.conftest import Make
from tests.store.etcd_server import free_port


def drain(job: Cluster, node: str, run_id: str | None = None) -> subprocess.CompletedProcess[str]:
    host, port = job.endpoints[0]
    command = [sys.executable, "-m", "ft_launcher", "drain", node, "--store", f"etcd://{host}:{port}", "--run-id", run_id or job.run_id]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_drain_says_that_the_store_is_away_and_gives_up() -> None:
    command = [
        sys.executable,
        "-m",
        "ft_launcher",
        "--store-timeout",
        "3",
        "drain",
        "n1",
        "--store",
        f"etcd://127.0.0.1:{free_port()}",
        "--run-id",
        "r",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 69
    first, second = done.stderr.splitlines()
    assert "the store does not answer; trying for 3 s" in first
    assert "no answer for 3 s (--store-timeout)" in second


def test_term_to_one_agent_hands_its_place_to_the_spare_and_costs_nothing(make: Make) -> None:
    job = make(nproc=2).start("n0", "n1", "n2")
    before = job.until_step(0, 2)
    victim, spare = job.holder(2, 0), next(n for n in ("n0", "n1", "n2") if n not in before)
    ranks = job[victim].ranks()
    job.until(lambda: (job.stored(f"reports/{spare}") or {}).get("standby"), "the spare is ready")
    job[victim].process.send_signal(signal.SIGTERM)
    after = job.until_step(1)
    assert after == {spare: before[victim], **{n: r for n, r in before.items() if n != victim}}
    assert job[victim].wait() == 0, job.story()
    assert gone(ranks, 5)
    assert [(d["rule"], d["decision"]) for d in job.decisions()] == [(2, "replace")]
    stored = job.stored("job")
    assert stored is not None
    assert stored["budgets"]["restarts"] == 0


def test_drain_asks_waits_and_says_what_became_of_it(make: Make) -> None:
    job = make(nproc=1).start("n0", "n1", "n2")
    before = job.until_step(0, 2)
    victim, spare = job.holder(0, 0), next(n for n in ("n0", "n1", "n2") if n not in before)
    job.until(lambda: (job.stored(f"reports/{spare}") or {}).get("standby"), "the spare is ready")
    done = drain(job, victim)
    assert done.returncode == 0, done.stderr
    assert f"{victim} has left; {spare} is in its place (cycle 1)" in done.stderr
    assert job[victim].wait() == 0
    job.until_step(1)
    refused = drain(job, spare)
    assert refused.returncode == 75
    assert "no spare can take its place" in refused.stderr
    assert refused.stderr.count("\n") == 1
    job.until_step(1, 3)
    assert job.cycle() == 1, "and nothing has changed"


def test_a_spare_that_is_drained_leaves_and_unknown_names_are_refused(make: Make) -> None:
    job = make(nproc=1).start("n0", "n1", "n2")
    before = job.until_step(0, 2)
    spare = next(n for n in ("n0", "n1", "n2") if n not in before)
    assert drain(job, "n9").returncode == 2
    assert "it has n0, n1, n2" in drain(job, "n9").stderr
    unknown = drain(job, "n0", run_id="nothing")
    assert unknown.returncode == 2
    assert "knows no run 'nothing'" in unknown.stderr
    done = drain(job, spare)
    assert done.returncode == 0, done.stderr
    assert job[spare].wait() == 0
    assert job.cycle() == 0
    assert all(job[n].running() for n in before)


def test_the_controllers_own_node_is_drained(make: Make) -> None:
    """It lets its own ranks go, hands over, and whoever follows it knows what it has decided."""
    job = make(nproc=1).start("n0", "n1")
    before = job.until_step(0)
    job.add_spares("s0")
    leader = job.leader()
    assert leader in before
    job[leader].terminate()
    after = job.until_step(1)
    assert after == {"s0": before[leader], **{n: r for n, r in before.items() if n != leader}}
    assert job[leader].wait() == 0, job.story()
    job.until(lambda: (job.stored("leader") or {"node": leader})["node"] != leader, "a successor")
    job.signal_rank(0)
    job.until_step(2)
    assert (job.stored("job") or {})["budgets"]["restarts"] == 1


def test_a_machine_that_signals_all_its_processes_is_drained_and_nothing_is_charged(make: Make) -> None:
    """As at a shutdown: its ranks die of the signal before it is clear that only this node is meant."""
    job = make(nproc=2).start("n0", "n1")
    before = job.until_step(0)
    job.add_spares("s0")
    processes = job["n1"].processes()
    assert len(processes) >= 4
    job["n1"].signal_all(processes, signal.SIGTERM)
    assert job.until_step(1) == {"n0": before["n0"], "s0": before["n1"]}, job.story()
    assert job["n1"].wait() == 0, job.story()
    assert {d["rule"] for d in job.decisions()} == {2}, job.decisions()
    assert (job.stored("job") or {})["budgets"]["restarts"] == 0


def test_no_drain_for_a_job_that_is_told_to_stop_meanwhile(make: Make) -> None:
    """One node is told, and before its ranks have left the others are, too: then nothing starts again."""
    job = make(nproc=1)
    job.options = ("--term-grace", "1000")
    job.conf["plan"] = [{"at": 1, "do": "leave_on_term", "value": 0, "save_s": SAVE_S}]
    job.start("n0", "n1")
    job.until(lambda: len(job.lines("acts.jsonl")) == 2, "handlers are there")
    job.add_spares("s0")
    for node in ("n1", "n0"):
        job[node].terminate()
        job.until(lambda node=node: node != "n1" or "if the others are not told within" in job.story(), "the first is heard")
    assert {n: job[n].wait() for n in ("n0", "n1", "s0")} == {"n0": 143, "n1": 143, "s0": 0}, job.story()
    assert sorted(x["rank"] for x in job.lines("term.jsonl")) == [0, 1], "each of them once"
    assert job.verdict()["outcome"] == "stopped"
    assert job.cycle() == 0
