"""Wrong numbers in the Megatron example, with its own ranks and a launcher played by hand: 16, another place, 17, the verdict, and the losses of a run without fault."""

from __future__ import annotations

import os
from pathlib import Path

import options
import pytest
from example_ranks import Nursery, losses
from test_example_megatron import SHAPE, train, undisturbed  # noqa: F401  the fixture

HERE, THERE = "node-a", "node-b"


def start(nursery: Nursery, folder: Path, node: str, *inject: object, verdict: str = "") -> tuple[set[int], str]:
    """One cycle on `node`: (exit codes of its ranks, what they said)."""
    logs = folder / f"logs{len(list(folder.glob('logs*')))}"
    run = nursery.start(train(folder, *inject), logs, **SHAPE, FT_NODE_ID=node, FT_RERUN_VERDICT=verdict)
    return set(run.wait()), run.output()


def fault_checkpoints(folder: Path) -> list[str]:
    return [path.name for path in (folder / "save").glob("*.fault")]


def test_a_persistent_fault_is_cured_elsewhere(nursery: Nursery, tmp_path: Path, undisturbed: dict[int, str]) -> None:  # noqa: F811
    """On rank 1, which has no loss to look at: its own gradients show it, before anybody else has them."""
    inject = ("--inject", "persistent", "--at", 6, "--on", 1)
    codes, output = start(nursery, tmp_path, HERE, *inject)
    assert codes == {16} and fault_checkpoints(tmp_path) == ["iter_0000005.f0001.fault"]
    assert "Rank 1, node node-a, device index:1, iteration 6: First rerun: unexpected result is reproducible" in output
    codes, output = start(nursery, tmp_path, HERE, *inject)
    assert codes == {16} and "Got rescheduled on the same device" in output
    codes, output = start(nursery, tmp_path, THERE, *inject)
    assert codes == {17} and "iteration 6: Second rerun: unexpected result is not reproducible on a different device" in output
    codes, output = start(nursery, tmp_path, THERE, *inject, verdict="persistent")
    assert codes == {0} and "resumed from iter_0000005.f0001.fault: iteration 5" in output
    assert losses(tmp_path / "log.jsonl") == undisturbed


def test_a_transient_fault_is_over(nursery: Nursery, tmp_path: Path, undisturbed: dict[int, str]) -> None:  # noqa: F811
    """In the step behind a checkpoint: the fault's checkpoint is another one of the same iteration."""
    inject = ("--inject", "transient", "--at", 5, "--on", 2)
    codes, output = start(nursery, tmp_path, HERE, *inject)
    assert codes == {17} and fault_checkpoints(tmp_path) == ["iter_0000004.f0001.fault"] and "not reproducible within" in output
    assert start(nursery, tmp_path, HERE, *inject, verdict="transient")[0] == {0}
    assert losses(tmp_path / "log.jsonl") == undisturbed


def test_a_mistake_of_the_program_is_the_same_everywhere(nursery: Nursery, tmp_path: Path) -> None:
    inject = ("--inject", "application", "--at", 6, "--on", 3)
    assert start(nursery, tmp_path, HERE, *inject)[0] == {16}
    codes, output = start(nursery, tmp_path, THERE, *inject)
    assert codes == {17} and "Correct result (but possible application error)" in output


def test_a_damaged_fault_checkpoint_costs_the_question(nursery: Nursery, tmp_path: Path, undisturbed: dict[int, str]) -> None:  # noqa: F811
    """Back to the checkpoint before, where nothing is disputed: elsewhere the steps come out right."""
    inject = ("--inject", "persistent", "--at", 6, "--on", 0)
    assert start(nursery, tmp_path, HERE, *inject)[0] == {16}
    shard = tmp_path / "save" / "iter_0000005.f0001.fault" / "__1_0.distcp"
    os.truncate(shard, shard.stat().st_size // 2)
    codes, output = start(nursery, tmp_path, THERE, *inject)
    assert codes == {0} and "iter_0000005.f0001.fault is damaged" in output and "resumed from iter_0000004.f0001" in output
    assert losses(tmp_path / "log.jsonl") == undisturbed


def test_checks_alone_change_nothing_and_no_checks_notice_nothing(nursery: Nursery, tmp_path: Path, undisturbed: dict[int, str]) -> None:  # noqa: F811
    for which in ("ours", "megatron"):
        (tmp_path / which).mkdir()
        assert start(nursery, tmp_path / which, HERE, "--rerun", which)[0] == {0}
        assert losses(tmp_path / which / "log.jsonl") == undisturbed
    silent = ("--rerun", "off", "--inject", "transient", "--at", 6, "--on", 3, "--sample-bytes", 0)
    assert start(nursery, tmp_path, HERE, *silent)[0] == {0}
    spoiled = losses(tmp_path / "log.jsonl")
    assert spoiled[6] == undisturbed[6] and spoiled[7] == "nan", "a silent fault is in the weights"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--inject", "transient", "--on", "0", "--save", "x"], "needs --at 2 or later (found None)"),
        (["--inject", "transient", "--on", "0", "--save", "x", "--at", "1"], "needs --at 2 or later (found 1)"),
        (["--inject", "persistent", "--at", "3", "--on", "4", "--save", "x"], "needs --on 0 to 3, the rank that it strikes (found 4)"),
        (["--inject", "persistent", "--at", "3", "--on", "0"], "needs --save DIR"),
        (["--inject", "cosmic"], "invalid choice: 'cosmic'"),
    ],
)
def test_bad_options_are_one_line(argv: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit) as end:
        options.parse(argv)
    assert end.value.code == 2 and words in capsys.readouterr().err.splitlines()[-1]


def test_who_checks_unless_said() -> None:
    assert options.parse([]).rerun == "off" and options.parse(["--error-injection-rate", "9"]).rerun == "ours"
