"""What is derived from ft_state.json and the journals: rank states, the newest incident, what faults have cost."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from ft_launcher.dashboard import api, incident_view, source
from ft_launcher.dashboard.board import Board
from ft_launcher.dashboard.losses import losses
from ft_launcher.dashboard.moment import culprit_of
from ft_launcher.dashboard.source import Snapshot, Source
from ft_launcher.dashboard.tail import JournalTail
from tests.dashboard.runs import Run, storied


@pytest.fixture(autouse=True)
def _every_look_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "AGAIN_S", 0.0)


def look(run: Run) -> Snapshot:
    return Source(run.log_dir).look()


def started(log_dir: Path) -> Run:
    run = Run(log_dir)
    run.later(1)
    run.start_cycle(iteration=0)
    run.save()
    return run


def test_a_life_of_ranks_from_the_journal_while_the_file_says_nothing_new(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save()
    watched = Source(tmp_path)
    assert watched.look().states == "wwwwwwww"
    run.start_cycle(iteration=0, forked=False)
    assert watched.look().states == "ssssssss"
    run.fork(range(8))
    assert watched.look().states == "rrrrrrrr"
    run.find("suspect", 5, 6.2, 9.3)
    assert watched.look().states == "rrrrrqrr"
    run.find("recovered", 5, 7.0, 0.0)
    assert watched.look().states == "rrrrrrrr"
    run.find("hung", 5, 9.6, 9.3)
    assert watched.look().states == "rrrrrhrr"
    run.job("ending", "rank 5 hangs")
    assert watched.look().states == "ttttthtt"
    run.end_cycle("hang", 5, "it is stopped")
    seen = watched.look()
    assert (seen.states, seen.moment.phase) == ("tttttktt", "ending")
    assert seen.latest is not None
    assert seen.latest.culprit is not None
    assert (seen.latest.culprit["rank"], seen.latest.culprit["coords"]) == (5, {"tp": 1, "cp": 0, "dp": 0, "pp": 1})
    run.job("paused", "backoff")
    assert watched.look().states == "wwwwwkww"
    run.start_cycle(iteration=0, recovery_s=0.5)
    seen = watched.look()
    assert seen.states == "rrrrrrrr"
    assert seen.latest is not None
    assert (seen.latest.culprit or {})["rank"] == 5, "who it was is known while it runs again"
    assert (seen.latest.recovery_s, seen.latest.complete) == (0.5, True)
    run.line("ended", run.cycle, rank=2, code=1)
    run.line("ended", run.cycle, rank=3, code=0)
    assert watched.look().states == "rrxfrrrr"
    run.job("done", "all ranks finished", {"outcome": "finished", "exit_code": 0})
    assert watched.look().states == "ffffffff"


def test_a_run_that_failed_keeps_its_culprit_marked(tmp_path: Path) -> None:
    run = started(tmp_path)
    run.end_cycle("hang", 3, "it is stopped", decision="stop")
    run.conclude("failed", 1, "restarts are used up")
    run.save()
    seen = look(run)
    assert seen.states == "tttktttt"
    assert (seen.moment.outcome, seen.moment.exit_code) == ("failed", 1)
    assert seen.verdict is not None


def test_a_copy_without_journal_tells_phase_and_culprit_from_the_file(tmp_path: Path) -> None:
    run = storied(tmp_path / "logs")
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(run.log_dir / "ft_state.json", tmp_path / "elsewhere" / "copy.json")
    shutil.move(run.log_dir, tmp_path / "gone")
    seen = Source(tmp_path / "elsewhere" / "copy.json").look()
    assert seen.run_folder is None
    assert seen.states == "rrrrrrrr"
    assert seen.latest is not None
    assert (seen.latest.cycle, (seen.latest.culprit or {})["rank"], seen.latest.recovery_s) == (1, 5, 0.63)


def test_the_run_folder_is_found_where_the_file_says_it_is(tmp_path: Path) -> None:
    run = storied(tmp_path / "logs")
    copied = tmp_path / "copy.json"
    shutil.copy(run.log_dir / "ft_state.json", copied)
    assert Source(copied).look().run_folder == run.folder.path


def test_ranks_whose_journal_is_not_here_count_as_running(tmp_path: Path) -> None:
    run = Run(tmp_path, nproc=4)
    run.start_cycle(iteration=0)
    run.save()
    assert look(run).states == "rrrrrrrr"
    run.folder.journal("node001").unlink()
    assert look(run).states == "rrrrrrrr"
    run.start_cycle(iteration=0, forked=False)
    assert look(run).states == "ssssrrrr"


def test_an_older_journal_does_not_overrule_a_newer_file(tmp_path: Path) -> None:
    run = started(tmp_path)
    run.document["run"] |= {"phase": "done", "revision": run.revision + 1, "outcome": "finished", "exit_code": 0}
    run.save()
    assert look(run).moment.phase == "done"


def test_a_folder_of_another_launch_lends_its_incidents_only(tmp_path: Path) -> None:
    old = storied(tmp_path)
    old.conclude("failed", 1, "restarts are used up")
    new = started(tmp_path)
    assert new.folder.generation == 1
    seen = Source(old.folder.path).look()
    assert (seen.moment.phase, seen.states, seen.incident_count) == ("running", "rrrrrrrr", 2)
    assert "generation 1" in seen.notes[0]
    assert Source(tmp_path).look().incident_count == 0


def test_a_folder_that_goes_and_comes_back_is_known_again(tmp_path: Path) -> None:
    run = storied(tmp_path / "logs")
    run.conclude("failed", 1, "restarts are used up")
    run.save()
    watched = Source(run.log_dir / "ft_state.json")
    assert watched.look().verdict is not None
    run.folder.path.rename(tmp_path / "away")
    gone = watched.look()
    assert (gone.verdict, gone.incident_count, gone.run_folder) == (None, 0, None)
    (tmp_path / "away").rename(run.folder.path)
    back = watched.look()
    assert (back.verdict is not None, back.incident_count) == (True, 2)


def test_pipes_in_the_place_of_files_are_not_waited_for(tmp_path: Path) -> None:
    run = storied(tmp_path)
    for place in (run.folder.path / "verdict.json", run.folder.path / "journal.pipe.jsonl"):
        os.mkfifo(place)
    folder = run.folder.path / "incidents" / "0002"
    for name in ("summary.json", "stacks/rank_00005.txt"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
    assert look(run).states == "rrrrrrrr"
    assert incident_view.view(folder, None) is None


def test_losses(tmp_path: Path) -> None:
    cost = look(storied(tmp_path)).losses
    assert [(c.outage_s, c.repeated, c.regained) for c in cost.cycles] == [(0.41, 40, True), (0.63, 100, True), (None, None, None)]
    assert cost.outage_s == pytest.approx(1.04)
    lost_s = 1.04 + 1500 * 40 / 840 + 5203.4 * 100 / 3300
    assert cost.goodput == pytest.approx(1 - lost_s / (1500 + 5203.4 + 170), abs=1e-6)


def test_losses_of_what_nobody_can_know() -> None:
    row = {
        "generation": 0,
        "n": 0,
        "start": "2026-01-01T00:00:00Z",
        "end": "2026-01-01T00:10:00Z",
        "iteration_start": None,
        "iteration_end": None,
    }
    after = {**row, "n": 1, "start": "2026-01-01T00:10:30Z", "end": None, "recovery_s": None}
    cost = losses([row, after], {"written": "2026-01-01T00:20:00Z", "outcome": None, "iteration": None})
    assert (cost.cycles[0].outage_s, cost.cycles[0].repeated, cost.repeated) == (30.0, None, 0)
    assert cost.goodput == pytest.approx(1 - 30 / 1200)
    requeued = {**after, "generation": 1, "start": "2026-01-01T01:00:00Z", "recovery_s": 0.2}
    assert losses([row, requeued], {"written": "2026-01-01T01:10:00Z"}).outage_s == 3000.0, "between two launches the gap counts"
    assert losses([], None).goodput is None
    assert losses([{**row, "start": "yesterday", "end": 5}], {}).goodput is None


@pytest.mark.parametrize("value", [None, 5, [], {}, {"rank": "5"}, {"rank": 5, "coords": 7}, {"rank": 5, "coords": "tp=x,pp"}])
def test_odd_culprits(value: object) -> None:
    made = culprit_of(value)
    assert made is None or made["coords"] == {}


def test_the_tail_reads_each_line_once_and_half_lines_when_they_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "journal.a.jsonl"
    tail = JournalTail(tmp_path)
    assert tail.poll() == (False, [])
    one = json.dumps({"kind": "ended", "cycle": 0, "rank": 1, "code": 0})
    path.write_text(one + "\n" + one[:10])
    assert len(tail.poll()[1]) == 1
    assert tail.poll() == (False, [])
    with path.open("a") as file:
        file.write(one[10:] + "\nnot json\n[1]\n" + '{"kind":"said","cycle":0}\n' + one + "\n")
    assert len(tail.poll()[1]) == 2
    (tmp_path / "journal.b.jsonl").write_text(one + "\n")
    assert len(tail.poll()[1]) == 1
    path.write_text(one + "\n")
    anew, lines = tail.poll()
    assert (anew, len(lines)) == (True, 2), "a file that was cut short makes everything begin anew"
    path.unlink()
    assert tail.poll() == (False, [])


def test_a_huge_journal_is_read_from_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ft_launcher.dashboard.tail.FIRST_LOOK_BYTES", 1000)
    monkeypatch.setattr("ft_launcher.dashboard.tail._LEAST_BYTES", 1000)
    lines = [json.dumps({"kind": "ended", "cycle": 0, "rank": i, "code": 0}) for i in range(1000)]
    (tmp_path / "journal.a.jsonl").write_text("\n".join(lines) + "\n")
    ranks = [event["rank"] for event in JournalTail(tmp_path).poll()[1]]
    assert ranks[-1] == 999
    assert 10 < len(ranks) < 25
    assert ranks == list(range(1000 - len(ranks), 1000))


ODD = [None, "x", -1, 2.5, True, [], {}, [[]], {"a": 1}]


def test_the_board_survives_any_line(tmp_path: Path) -> None:
    board = Board()
    kinds = (
        "job",
        "forked",
        "ended",
        "finding-suspect",
        "finding-hung",
        "finding-recovered",
        "seen",
        "decision",
        "restarted",
        "recovered",
        "new",
    )
    fields = ("rank", "pids", "job", "rev", "since_s", "limit_s", "section", "ranks", "seconds", "culprit", "cause", "code", "signal")
    for kind in kinds:
        for odd in ODD:
            board.fold([{"kind": kind, "cycle": odd}, {"kind": kind, "cycle": 0, **dict.fromkeys(fields, odd)}])
    run = started(tmp_path)
    with run.folder.journal(run.nodes[0]).open("a") as file:
        for kind in kinds:
            for odd in ODD:
                file.write(json.dumps({"kind": kind, "cycle": 0, "node": odd, **dict.fromkeys(fields, odd)}) + "\n")
    seen = look(run)
    assert len(seen.states) == 8
    json.loads(api.body(seen)[0])


def test_whatever_the_file_holds_the_state_is_json(tmp_path: Path) -> None:
    run = storied(tmp_path)
    good = json.loads((tmp_path / "ft_state.json").read_text())
    (tmp_path / "ft_state.json.bak").unlink()
    watched = Source(tmp_path)
    for key in ("run", "sections", "cycles", "hardware", "budgets", "earlier_runs", "dropped", "current_timeouts"):
        for odd in ODD:
            inner = (
                [{**good[key], name: odd} for name in good[key]]
                if isinstance(good[key], dict)
                else [[odd], [{**good[key][0], "culprit": odd, "start": odd}]]
            )
            for candidate in (odd, *inner):
                (tmp_path / "ft_state.json").write_text(json.dumps({**good, key: candidate}))
                json.loads(api.body(watched.look())[0])
    assert run.world == 8


def test_the_same_files_give_the_same_snapshot_and_tag(tmp_path: Path) -> None:
    run = storied(tmp_path)
    watched = Source(tmp_path)
    first = watched.look()
    assert watched.look() is first
    assert api.body(first)[1] == api.body(Source(tmp_path).look())[1]
    run.find("suspect", 1, 6.0, 9.0)
    assert watched.look() is not first
    assert "learning" not in api.state(watched.look())


def test_axes_are_those_of_the_rank_order(tmp_path: Path) -> None:
    found = {
        axis["name"]: (axis["size"], axis["stride"]) for axis in api.axes(look(storied(tmp_path, tp=2, dp=4, pp=2)).document or {}) or []
    }
    assert found == {"tp": (2, 1), "cp": (1, 1), "dp": (4, 2), "pp": (2, 8)}
    odd = {"run": {"world_size": 8, "topology": {"tp": 3}}}
    assert api.axes(odd) is None
    swapped = {"run": {"world_size": 8, "topology": {"tp": 2, "pp": 2, "order": "pp-dp-ep-cp-tp"}}}
    assert {axis["name"]: axis["stride"] for axis in api.axes(swapped) or []} == {"pp": 1, "dp": 2, "cp": 1, "tp": 4}
