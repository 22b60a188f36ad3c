"""The rule by itself: verdicts in, orders out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ft_launcher.core.hardware import DeviceRecord, exclusions, suspected
from ft_launcher.integrations.slurm_rule import Ending, Requeue, decide, ending, newest_generation, read_past, remember
from ft_launcher.shell.incident import FirstCause, Verdict, write_verdict

NODES = ["n1", "n2", "n3"]


def verdict(log_dir: Path, generation: int, doc: Any, run_id: str = "7") -> None:
    folder = log_dir / f"{run_id}.{generation}"
    folder.mkdir(parents=True)
    (folder / "verdict.json").write_text(doc if isinstance(doc, str) else json.dumps(doc))


@pytest.mark.parametrize("code", [*range(1, 16), 17, 69, 70, 93, 99, 128 + 9, 128 + 15, 255])
def test_what_is_not_requeued(code: int) -> None:
    order = decide(Ending(code, "why", ("n1",)), [], NODES, most=5)
    assert not order.requeue
    assert order.why == f"exit code {code} is not requeued (why)"


def test_only_the_nodes_of_the_job_are_excluded_and_earlier_ones_stay() -> None:
    order = decide(Ending(16, "why", ("n2", "elsewhere")), [Requeue(16, ("n9",)), Requeue(75, ("n9",))], NODES, most=5)
    assert (order.requeue, order.exclude) == (True, ("n9", "n2"))
    assert "elsewhere" in order.why


def test_a_machine_that_is_excluded_already_is_not_complained_about() -> None:
    """A device in quarantine stays in the verdicts of later launches, on nodes that the job no longer has."""
    order = decide(Ending(16, "why", ("n9", "n1")), [Requeue(16, ("n9",))], NODES, most=5)
    assert order.exclude == ("n9", "n1")
    assert "not excluded" not in order.why


def test_the_launchers_own_verdict_is_read(tmp_path: Path) -> None:
    """As the launcher writes it, exclusions from its ledger of devices included."""
    ledger = suspected({}, "GPU-1", DeviceRecord("n3", 0, why="its sum differed"), 0)
    cause = FirstCause(3, {"tp": 1}, "n1", 2, "rerun", 16)
    folder = tmp_path / "7.0"
    folder.mkdir()
    write_verdict(folder, Verdict("rerun_elsewhere", 16, "why", 1, cause, exclusions(ledger, ["GPU-1"])))
    assert ending(tmp_path, "7", newer_than=-1, srun_code=137) == Ending(16, "why", ("n3", "n1"), 0)


@pytest.mark.parametrize(("past", "most", "requeue"), [(0, 0, False), (0, 1, True), (1, 1, False), (4, 5, True)])
def test_the_bound(past: int, most: int, requeue: bool) -> None:
    assert decide(Ending(75, ""), [Requeue(75, ())] * past, NODES, most).requeue is requeue


@pytest.mark.parametrize(
    ("doc", "named"),
    [
        ({"exit_code": 16, "first_cause": {"node": "n1"}}, ("n1",)),
        ({"exit_code": 16, "first_cause": {"node": None}}, ()),
        ({"exit_code": 16, "first_cause": None}, ()),
        ({"exit_code": 16, "exclude": [{"node": "n3", "slot": 0, "device": "", "why": ""}], "first_cause": {"node": "n1"}}, ("n3", "n1")),
        ({"exit_code": 16, "exclude": [{"node": "n1"}, {"node": "n1"}], "first_cause": {"node": "n1"}}, ("n1",)),
        ({"exit_code": 16, "exclude": {"node": "n3"}, "first_cause": "n1"}, ()),
        ({"exit_code": 16, "exclude": [{"node": "n1; rm -rf /"}, {"node": 3}, "n1", {"node": "-x"}, {}]}, ()),
        ({"exit_code": 75, "first_cause": {"node": "n1"}}, ()),
        ({"exit_code": 75, "exclude": [{"node": "n2"}], "first_cause": {"node": "n1"}}, ("n2",)),
    ],
)
def test_whom_a_verdict_names(tmp_path: Path, doc: dict[str, Any], named: tuple[str, ...]) -> None:
    verdict(tmp_path, 0, doc)
    end = ending(tmp_path, "7", newer_than=-1, srun_code=137)
    assert (end.code, end.named) == (doc["exit_code"], named)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"exit_code": "16"}', '{"exit_code": null}', "\x00"])
def test_a_verdict_that_cannot_be_read_leaves_sruns_code(tmp_path: Path, text: str) -> None:
    verdict(tmp_path, 3, text)
    assert ending(tmp_path, "7", newer_than=2, srun_code=75) == Ending(75, "this launch left no verdict.json")


def test_only_a_newer_generation_of_this_run_is_this_launchs(tmp_path: Path) -> None:
    verdict(tmp_path, 9, {"exit_code": 16, "reason": "r", "first_cause": {"node": "n1"}})
    verdict(tmp_path, 10, {"exit_code": 0, "reason": "other run"}, run_id="77")
    assert newest_generation(tmp_path, "7") == 9
    assert ending(tmp_path, "7", newer_than=9, srun_code=2).code == 2
    assert ending(tmp_path, "7", newer_than=8, srun_code=2) == Ending(16, "r", ("n1",), 9)
    assert newest_generation(tmp_path / "nothing", "7") == -1


def test_requeues_are_remembered_and_damage_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "not yet" / "past.jsonl"
    assert read_past(path) == []
    remember(path, Requeue(16, ("n1", "n2")))
    with path.open("a") as file:
        file.write('{"code": 16}\nnonsense\n{"code": 75, "exclude": ["ok", "$(reboot)", 4]}\n{"code"')
    assert read_past(path) == [Requeue(16, ("n1", "n2")), Requeue(75, ("ok",))]
