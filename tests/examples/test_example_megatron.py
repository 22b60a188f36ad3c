"""The Megatron example on real ranks: whatever kills it, and whenever, it ends with the losses of an undisturbed run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from example_ranks import TRAIN, Nursery, losses, reached, running, until

SABOTAGE = Path(__file__).with_name("sabotage.py")
ITERATIONS = 12
IMPORTED_LATE = "imported late: "
SMALL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --global-batch-size 4 "
    "--attention-dropout 0.1 --hidden-dropout 0.1 --save-interval 4 --eval-interval 6 --eval-iters 1 --sample-bytes 8"
)
SHAPE = {"FT_TP": "2", "FT_PP": "2"}


def train(folder: Path, *more: object) -> list[object]:
    return [TRAIN, *SMALL.split(), "--train-iters", ITERATIONS, "--save", folder / "save", "--log", folder / "log.jsonl", *more]


@pytest.fixture(scope="session")
def undisturbed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Losses of a run that nothing happens to, dropout and all."""
    folder = tmp_path_factory.mktemp("undisturbed")
    output = nursery.start(train(folder), folder / "logs", **SHAPE).succeed()
    assert "held-out loss" in output and "sample:\n    import os" in output
    found = losses(folder / "log.jsonl")
    assert sorted(found) == list(range(1, ITERATIONS + 1))
    assert sorted(path.name for path in (folder / "save").glob("iter_*")) == [f"iter_00000{n:02}.f0001" for n in (4, 8, 12)]
    return found


def resume(nursery: Nursery, folder: Path, undisturbed: dict[int, str]) -> str:
    """Start again and end well, with the undisturbed run's losses and a clean folder; what it printed."""
    output = nursery.start(train(folder), folder / "again", **SHAPE).succeed()
    assert losses(folder / "log.jsonl") == undisturbed
    assert not list((folder / "save").glob(".tmp-*"))
    return output


def test_losses_fall(undisturbed: dict[int, str]) -> None:
    assert float.fromhex(undisturbed[ITERATIONS]) < float.fromhex(undisturbed[1]) - 0.5


def test_a_rank_killed_in_a_step(nursery: Nursery, tmp_path: Path, undisturbed: dict[int, str]) -> None:
    with running(nursery.start(train(tmp_path, "--step-delay-ms", 30), tmp_path / "logs", **SHAPE)) as run:
        until(reached(tmp_path / "log.jsonl", 6), run.output)
        run.kill([2])
    assert run.statuses[2] == -signal.SIGKILL
    assert "resumed from iter_0000004.f0001: iteration 4, 16 samples used" in resume(nursery, tmp_path, undisturbed)


def test_killed_as_soon_as_a_save_shows(nursery: Nursery, tmp_path: Path, undisturbed: dict[int, str]) -> None:
    with running(nursery.start(train(tmp_path), tmp_path / "logs", **SHAPE)) as run:
        until(lambda: bool(list((tmp_path / "save").glob(".tmp-iter_0000008*"))), run.output)
        run.kill([1])
    resume(nursery, tmp_path, undisturbed)


@pytest.mark.parametrize(
    ("point", "resumes_from"),
    [
        ("write@2", "iter_0000004.f0001"),
        ("seal@2", "iter_0000004.f0001"),
        ("commit@2", "iter_000000"),  # sealed, not committed: complete, so either is right
        ("committed@2", "iter_0000008.f0001"),
        ("seal@1", None),
    ],
)
def test_killed_at_each_point_of_a_save(
    nursery: Nursery, tmp_path: Path, undisturbed: dict[int, str], point: str, resumes_from: str | None
) -> None:
    argv = [SABOTAGE, point, *train(tmp_path)]
    with running(nursery.start(argv, tmp_path / "logs", **SHAPE)) as run:
        victim = 3 if point.startswith("write") else 0
        until(lambda: nursery.ended(run.pids[victim]) is not None, run.output)
        run.kill()
    assert run.statuses[victim] == -signal.SIGKILL, run.output()
    output = resume(nursery, tmp_path, undisturbed)
    assert f"resumed from {resumes_from}" in output if resumes_from else "resumed" not in output


def test_killed_again_and_again(nursery: Nursery, tmp_path: Path, undisturbed: dict[int, str]) -> None:
    """Three starts end in three places; progress is never lost, older checkpoints go."""
    for start, last in enumerate((5, 7, 11)):
        with running(nursery.start(train(tmp_path, "--step-delay-ms", 20), tmp_path / f"logs{start}", **SHAPE)) as run:
            until(reached(tmp_path / "log.jsonl", last), run.output)
            run.kill([start])
    resume(nursery, tmp_path, undisturbed)
    assert [path.name for path in sorted((tmp_path / "save").glob("iter_*"))][-1] == "iter_0000012.f0004"


def damage_shard(checkpoint: Path) -> None:
    shard = checkpoint / "__2_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


def tear_manifest(checkpoint: Path) -> None:
    manifest = checkpoint / "manifest.json"
    os.truncate(manifest, manifest.stat().st_size // 2)


def lose_shard(checkpoint: Path) -> None:
    (checkpoint / "__1_0.distcp").unlink()


@pytest.mark.parametrize(
    ("harm", "words"),
    [(damage_shard, "__2_0.distcp does not match its checksum"), (tear_manifest, "missing or torn"), (lose_shard, "No such file")],
)
def test_a_damaged_checkpoint_is_passed_over(
    nursery: Nursery, tmp_path: Path, undisturbed: dict[int, str], harm: object, words: str
) -> None:
    nursery.start([*train(tmp_path), "--train-iters", 9, "--lr-decay-iters", ITERATIONS], tmp_path / "logs", **SHAPE).succeed()
    newest = tmp_path / "save" / "iter_0000009.f0001"
    assert callable(harm)
    harm(newest)
    output = resume(nursery, tmp_path, undisturbed)
    assert [line for line in output.splitlines() if "damaged" in line and words in line and newest.name in line], output
    assert "resumed from iter_0000008.f0001" in output


def test_an_older_start_that_wakes_up_cannot_commit(nursery: Nursery, tmp_path: Path, undisturbed: dict[int, str]) -> None:
    argv = train(tmp_path, "--step-delay-ms", 60)
    with running(nursery.start(argv, tmp_path / "logs", **SHAPE)) as old:
        until(reached(tmp_path / "log.jsonl", 5), old.output)
        old.signal(signal.SIGSTOP)
        resume(nursery, tmp_path, undisturbed)
        kept = sorted((tmp_path / "save").glob("iter_*.f0002"))
        old.signal(signal.SIGCONT)
        statuses = old.wait()
    assert all(status not in (0, -signal.SIGKILL) for status in statuses), old.output()
    assert "not committed, this run ends" in old.output()
    assert sorted((tmp_path / "save").glob("iter_*.f0002")) == kept
    output = nursery.start(train(tmp_path), tmp_path / "third", **SHAPE).succeed()
    assert "resumed from iter_0000012.f0002" in output


def test_without_leave_nothing_is_committed(nursery: Nursery, tmp_path: Path, undisturbed: dict[int, str]) -> None:
    output = nursery.start([SABOTAGE, "refuse", *train(tmp_path)], tmp_path / "logs", **SHAPE).succeed()
    assert "iter_0000004.f0001 not committed: this cycle is superseded" in output
    assert not list((tmp_path / "save").glob("*iter_*"))
    assert losses(tmp_path / "log.jsonl") == undisturbed


def test_another_shape_is_refused_in_one_line(nursery: Nursery, tmp_path: Path) -> None:
    nursery.start([*train(tmp_path), "--train-iters", 1], tmp_path / "logs", **SHAPE).succeed()
    run = nursery.start([*train(tmp_path), "--hidden-size", 64], tmp_path / "again", **SHAPE)
    assert run.wait() == [2] * 4
    assert not (tmp_path / "save" / "fence.2").exists(), "a mistake takes the folder from nobody"
    assert run.output().strip().endswith("iter_0000001.f0001 was written with hidden_size 32, this run has 64"), run.output()
    assert len(run.output().splitlines()) == 1


def test_pipeline_and_data_parallel(nursery: Nursery, tmp_path: Path) -> None:
    """PP2 x DP2, killed and resumed: as exact as TP2 x PP2."""
    shape = {"FT_TP": "1", "FT_PP": "2"}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    nursery.start(train(whole), whole / "logs", **shape).succeed()
    with running(nursery.start(train(broken, "--step-delay-ms", 20), broken / "logs", **shape)) as run:
        until(reached(broken / "log.jsonl", 9), run.output)
        run.kill([3])
    nursery.start(train(broken), broken / "again", **shape).succeed()
    assert losses(whole / "log.jsonl") == losses(broken / "log.jsonl")


def test_megatrons_own_flags_and_one_rank(nursery: Nursery, tmp_path: Path) -> None:
    """One rank, no launcher's environment; then `--load` from there into another folder."""
    alone = [TRAIN, *SMALL.split(), "--tensor-model-parallel-size", 1, "--train-iters", 3, "--save", tmp_path / "first"]
    nursery.start(alone, tmp_path / "logs", world=1).succeed()
    more = [TRAIN, *SMALL.split(), "--train-iters", 4, "--load", tmp_path / "first", "--save", tmp_path / "second"]
    assert "resumed from iter_0000003.f0001" in nursery.start(more, tmp_path / "again", world=1).succeed()
    assert [path.name for path in (tmp_path / "second").glob("iter_*")] == ["iter_0000004.f0001"]
    assert "resumed from iter_0000004.f0001" in nursery.start(more, tmp_path / "third", world=1).succeed()


def test_the_preload_list_is_complete(nursery: Nursery, tmp_path: Path) -> None:
    """After the fork nothing of torch or Megatron is imported any more, neither to start nor to resume."""
    assert nursery.threads == 1, "a fork with threads about is not safe"
    argv = [SABOTAGE, "imports", *train(tmp_path, "--train-iters", 4)]
    for logs in ("logs", "again"):
        output = nursery.start(argv, tmp_path / logs, **SHAPE).succeed()
        late = {name for line in output.splitlines() if line.startswith(IMPORTED_LATE) for name in line.removeprefix(IMPORTED_LATE).split()}
        assert {name for name in late if name.startswith(("torch.", "megatron.", "numpy."))} <= {"torch.profiler._cupti_monitor"}
