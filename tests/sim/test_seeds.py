"""Many seeds: no invariant breaks; the same seed is the same run; what users read of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from ft_launcher.config import SimulateOptions
from ft_launcher.core.job import JobMachine
from ft_launcher.core.roster import Roster
from ft_launcher.errors import ConfigError
from ft_launcher.sim import faults, inject, notation
from ft_launcher.sim.main import as_json, command, goodput, run
from ft_launcher.sim.setting import setting_of
from ft_launcher.sim.shrink import shrink
from tests.sim.worlds import CORRUPT, calm, corrupt, ran, rough, small

SEEDS = 90


def test_many_small_worlds_break_nothing_and_meet_everything() -> None:
    met: Counter[str] = Counter()
    for seed in range(SEEDS):
        world = ran(calm(small(seed)))
        assert not world.violations, f"seed {seed}: {world.violations[0]}"
        met += world.tally.faults + Counter(f"rule {cause}" for cause in world.tally.causes.elements()) + world.tally.outcomes
    kinds = {fault.kind for seed in range(SEEDS) for fault in calm(small(seed)).plan}
    assert kinds <= met.keys(), "a kind of fault that is drawn but strikes nobody proves nothing"
    assert {"rule crash", "rule hang", "rule node", "finished", "failed", "stopped", "not_enough_nodes", "rerun_elsewhere"} <= met.keys()


def test_one_node_like_the_embedded_store() -> None:
    for seed in range(40):
        world = ran(calm(small(seed, nodes=1, faults="crash=200,exit=100,stall=50,slowreap=100,spares=0,aftershock=0.5")))
        assert not world.violations, f"seed {seed}: {world.violations[0]}"


def test_rough_worlds_break_nothing_and_meet_everything() -> None:
    successions = kept = refused = 0
    met: Counter[str] = Counter()
    for seed in range(20):
        world = ran(rough(seed))
        assert not world.violations, f"seed {seed}: {world.violations[0]}"
        successions, kept, refused = successions + world.tally.successions, kept + world.tally.kept, refused + world.storage.refused
        met += world.tally.faults + Counter(f"rule {cause}" for cause in world.tally.causes.elements())
    assert {"cut", "freeze", "stall", "outage", "lossy", "slow", "node", "hang", "rule node", "rule hang"} <= met.keys()
    assert successions > 100, "controllers are lost too rarely to prove anything"
    assert kept > 50, "nodes without a lease are met too rarely"
    assert refused > 0, "no superseded cycle has tried to commit a checkpoint"


def test_wrong_numbers_break_nothing_and_meet_every_end() -> None:
    met: Counter[str] = Counter()
    for seed in range(25):
        world = ran(corrupt(seed))
        assert not world.violations, f"seed {seed}: {world.violations[0]}"
        met += world.tally.causes + world.tally.outcomes
    assert {"rerun", "transient fault", "persistent fault", "result_rejected", "rerun_elsewhere"} <= met.keys()


@pytest.mark.parametrize("learn", [True, False])
def test_slow_is_not_hung(learn: bool) -> None:
    for seed in range(6):
        setting = small(seed, faults="slow=3000,spares=0")
        world = ran(replace(setting, script=replace(setting.script, step_s=0.4, learn=learn)))
        assert not world.violations, f"seed {seed}: {world.violations[0]}"
        assert world.tally.faults["slow"] > 20
        assert world.tally.restarts == 0


def test_what_is_learned_finds_hangs_sooner_than_the_fixed_timeout() -> None:
    from ft_launcher.sim import script

    text = "world ranks=4 nodes=2 hours=2 script.step_s=0.2 script.save_s=0.1 script.learn={}\nat 3600 hang rank=3"
    learned, fixed = (ran(script.read(text.format(learn))) for learn in (1, 0))
    assert not learned.violations + fixed.violations
    assert [world.tally.causes["hang"] for world in (learned, fixed)] == [1, 1]
    found_at = [next(t for t, who, text in world.trace.story if "hangs:" in text) for world in (learned, fixed)]
    assert found_at[0] - 3600 < 60
    assert 179 < found_at[1] - 3600 < 181


def test_a_lost_controller_costs_what_its_own_ranks_cost() -> None:
    from ft_launcher.sim import script

    kill = "\n".join(f"at {at} node node=-1 closed={at // 600 % 2} returns=60" for at in range(600, 3600, 600))
    world = ran(script.read(f"world ranks=4 nodes=2 spares=6 hours=1.5 seed=5\n{kill}"))
    assert not world.violations, world.violations[0]
    assert world.tally.successions == 5
    assert world.tally.restarts == world.tally.spares_used == world.tally.causes["node"] < 5, "some held no rank: then nothing restarts"


def test_without_faults_nothing_is_lost() -> None:
    world = ran(small(1, faults="none"))
    script = world.setting.script
    assert (world.tally.restarts, world.tally.lost_steps, world.tally.launches) == (0, 0, 1)
    best = script.save_every * script.step_s / (script.save_every * script.step_s + script.save_s)
    assert 0.98 * best < goodput(world) <= best


def test_lost_work_is_what_was_done_since_the_checkpoint() -> None:
    from ft_launcher.sim import script

    world = ran(
        script.read("world ranks=4 nodes=2 hours=0.5 script.step_s=1 script.save_every=100 script.save_s=0\nat 450 crash rank=0 signal=9")
    )
    first_step_at = 450 - next(t for t, who, text in world.trace.story if "cycle 0 starts" in text) - world.setting.script.load_s
    done = int(first_step_at)
    assert abs(world.tally.lost_steps - done % 100) <= 1
    assert world.tally.restarts == 1


@pytest.mark.parametrize("mix", ["swarm", CORRUPT])
def test_same_seed_same_trace_whatever_the_hash_seed(mix: str) -> None:
    code = (
        "import sys; from ft_launcher.config import SimulateOptions; from ft_launcher.sim.main import run;"
        f"run(SimulateOptions(ranks=32, hours=6, seed=5, faults={mix!r}, json=True, story=True))"
    )
    said = []
    for hash_seed in ("1", "4242"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        said.append(subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False).stdout)
    assert said[0] == said[1]
    assert len(json.loads(said[0].splitlines()[-1])["trace_sha256"]) == 64


def test_another_seed_is_another_run() -> None:
    assert ran(small(1)).trace.digest() != ran(small(2)).trace.digest()


def test_the_last_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(SimulateOptions(ranks=16, hours=2, seed=3, faults="crash=50,hang=20,node=20", json=True))
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0
    assert {"trace_sha256", "restarts", "violations", "events", "hours"} <= last.keys()
    assert (last["violations"], last["hours"]) == ([], 2)
    assert last["events"] > 0


def test_a_failing_simulation_prints_the_command_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Roster, "unacknowledged", lambda self, state: [])
    options = SimulateOptions(ranks=8, nodes=4, hours=6, seed=1, faults="crash=400,spares=1", json=True)
    assert run(options) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("VIOLATION settling_waits_for_every_node: ") for line in lines)
    again = "again: ft-launch simulate --ranks 8 --nodes 4 --hours 6 --seed 1 --faults crash=400,spares=1 --story"
    assert again in lines
    (violation,) = json.loads(lines[-1])["violations"]
    assert violation["invariant"] == "settling_waits_for_every_node"


def test_the_printed_command_is_understood(capsys: pytest.CaptureFixture[str]) -> None:
    from ft_launcher.cli import run as cli

    options = SimulateOptions(ranks=8, nodes=4, hours=1, seed=7)
    assert cli(command(options).split()[1:]) in (0, 1)
    assert f"seed {options.seed}: 8 ranks on 4 nodes x 2 slots" in capsys.readouterr().out


def test_an_exception_in_the_core_is_a_violation_with_its_story(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: JobMachine, event: object) -> list[object]:
        raise KeyError("n7")

    monkeypatch.setattr(JobMachine, "on_report_running", broken)
    world = ran(small(1, faults="crash=100"))
    assert [v.name for v in world.violations] == ["no_exception"]
    assert "KeyError" in world.violations[0].text


def test_shrinking_keeps_the_violation_and_drops_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Roster, "unacknowledged", lambda self, state: [])
    setting = small(1, faults="crash=300,slowstore=300,stall=100")
    assert len(setting.plan) > 5
    shrunk = shrink(setting, "settling_waits_for_every_node")
    assert [fault.kind for fault in shrunk.plan] == ["crash"]
    assert ran(shrunk).violations[0].name == "settling_waits_for_every_node"


def test_every_kind_of_fault_can_be_brought_about() -> None:
    assert faults.KINDS.keys() == inject.STRIKES.keys()


@pytest.mark.parametrize("text", ["crash=0.5,hang=0.1,node=0.05", "none", "swarm", " crash = 1 ", "spares=4,max-restarts=0,aftershock=0.3"])
def test_notation(text: str) -> None:
    mix = notation.parse(text)
    assert mix.swarm == (text == "swarm")
    assert set(mix.rates) == {word for word in ("crash", "hang", "node") if word in text}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("flood=1", "unknown word 'flood'"),
        ("crash", "crash='' must be a number"),
        ("crash=much", "crash='much' must be a number"),
        ("crash=-1", "crash=-1 must be"),
        ("crash=nan", "crash=nan must be"),
        ("crash=inf", "crash=inf must be"),
        ("crash=1,crash=2", "given twice"),
        ("spares=1.5", "spares=1.5 must be a whole number"),
        ("aftershock=2", "from 0 to 1"),
        ("", "unknown word ''"),
        ("none,crash=1", "unknown word 'none'"),
        ("crash=1e9", "from 0 to 10000"),
    ],
)
def test_bad_notation_is_one_clear_line(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        notation.parse(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nodes_that_do_not_divide_the_ranks() -> None:
    with pytest.raises(ConfigError, match="--nodes 3 does not divide --ranks 8"):
        setting_of(SimulateOptions(ranks=8, nodes=3))


def test_rates_are_per_thousand_node_hours() -> None:
    counts = [len(setting_of(SimulateOptions(ranks=800, hours=100, seed=seed, faults="crash=2,spares=0")).plan) for seed in range(20)]
    assert 15 < sum(counts) / len(counts) < 25, "100 nodes x 100 hours at 2 per 1,000 node-hours are 20"


def test_json_of_a_run_is_json() -> None:
    assert json.loads(json.dumps(as_json(ran(small(3)))))["seed"] == 3
