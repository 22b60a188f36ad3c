"""The parts of the Megatron example that need no ranks: storage, text, options."""

from __future__ import annotations

import json
import os
from pathlib import Path

import data
import options
import pytest
import storage
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FT_TP", "FT_PP"):
        monkeypatch.delenv(name, raising=False)


CONTENT = {"a.bin": b"0123456789" * 50, "b.bin": b"weights", ".metadata": b"{}"}


def sealed(folder: Path, iteration: int = 4, fence: int = 1) -> Path:
    """A finished checkpoint with three files."""
    name = storage.name_of(iteration, fence)
    temporary = folder / (storage.TEMPORARY + name)
    temporary.mkdir(parents=True)
    for file, content in CONTENT.items():
        (temporary / file).write_bytes(content)
    storage.seal(folder, name, {file: storage.digest(temporary / file) for file in CONTENT}, {"layers": 4})
    return folder / name


def test_a_sealed_checkpoint_is_whole(tmp_path: Path) -> None:
    checkpoint = sealed(tmp_path)
    assert storage.damage(checkpoint) is None
    assert storage.checkpoints(tmp_path) == [checkpoint.name]
    assert (storage.manifest_of(checkpoint) or {})["run"] == {"layers": 4}


@settings(max_examples=60, deadline=None)
@given(file=st.sampled_from([*CONTENT, storage.MANIFEST]), where=st.floats(0, 0.999), bit=st.integers(0, 7), cut=st.booleans())
def test_no_cut_and_no_flipped_bit_goes_unnoticed(
    tmp_path_factory: pytest.TempPathFactory, file: str, where: float, bit: int, cut: bool
) -> None:
    checkpoint = sealed(tmp_path_factory.mktemp("damage"))
    path = checkpoint / file
    content = bytearray(path.read_bytes())
    position = int(where * len(content))
    before = storage.manifest_of(checkpoint)
    content[position:] = b"" if cut else bytes([content[position] ^ (1 << bit)]) + content[position + 1 :]
    path.write_bytes(content)
    # A bit in the manifest that changes neither files, sizes nor checksums (white space, the run's description) harms nobody.
    after = storage.manifest_of(checkpoint)
    harmless = before is not None and after is not None and file == storage.MANIFEST and after["files"] == before["files"]
    assert (storage.damage(checkpoint) is None) == harmless


@pytest.mark.parametrize("text", ["", "[]", "null", "3", "{}", '{"schema": "ft-example-checkpoint/1", "files": 3, "run": {}}', "\xff\x00"])
def test_a_strange_manifest_is_no_manifest(tmp_path: Path, text: str) -> None:
    checkpoint = sealed(tmp_path)
    (checkpoint / storage.MANIFEST).write_bytes(text.encode("latin-1"))
    assert storage.damage(checkpoint) == "manifest.json is missing or torn"


def test_shares_together_see_every_file(tmp_path: Path) -> None:
    checkpoint = sealed(tmp_path)
    (checkpoint / "b.bin").write_bytes(b"weightz")
    assert [storage.damage(checkpoint, share, 3) is None for share in range(3)].count(False) == 1


def test_newest_is_by_fence_then_iteration(tmp_path: Path) -> None:
    for iteration, fence in ((4, 1), (8, 2), (100000000, 1)):
        sealed(tmp_path, iteration, fence)
    (tmp_path / "iter_0000009").mkdir()
    assert storage.checkpoints(tmp_path) == ["iter_0000008.f0002", "iter_100000000.f0001", "iter_0000004.f0001"]
    assert storage.checkpoints(tmp_path / "nowhere") == []


def test_the_oldest_go_and_strays_never_displace_a_way_back(tmp_path: Path) -> None:
    """Fence 2 resumed from 8.f1; 12.f1 is damaged or was finished too late: it must not count as one of the two that are kept."""
    for iteration, fence in ((4, 1), (8, 1), (12, 1), (12, 2)):
        sealed(tmp_path, iteration, fence)
    (tmp_path / "iter_0000009").mkdir()
    storage.prune(tmp_path, 2, fence=2, chosen="iter_0000008.f0001")
    assert storage.checkpoints(tmp_path) == ["iter_0000012.f0002", "iter_0000012.f0001", "iter_0000008.f0001"]
    sealed(tmp_path, 16, 2)
    storage.prune(tmp_path, 2, fence=2, chosen="iter_0000008.f0001")
    assert storage.checkpoints(tmp_path) == ["iter_0000016.f0002", "iter_0000012.f0002"]
    assert (tmp_path / "iter_0000009").exists(), "what is not ours stays"


def test_only_leftovers_of_older_owners_are_swept(tmp_path: Path) -> None:
    for name in (".tmp-iter_0000004.f0001", ".tmp-iter_0000008.f0002", ".tmp-notes", "iter_0000004.f0001"):
        (tmp_path / name).mkdir()
    storage.sweep(tmp_path, fence=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tmp-iter_0000008.f0002", ".tmp-notes", "iter_0000004.f0001"]


def test_text_is_split_by_file_and_repeatable() -> None:
    train, held_out = data.standard_library(64)
    assert not {name for name, _ in train.files} & {name for name, _ in held_out.files}
    assert len(train.files) > 80 and len(held_out.files) > 8
    again, _ = data.standard_library(64)
    assert again.fingerprint() == train.fingerprint() != data.standard_library(32)[0].fingerprint()
    batch = train.batch(7, range(100, 103))
    assert batch.shape == (3, 65) and batch.equal(again.batch(7, range(100, 103)))
    assert not batch.equal(train.batch(8, range(100, 103))) and not batch.equal(train.batch(7, range(103, 106)))


def test_every_window_lies_inside_one_file(tmp_path: Path) -> None:
    """Files just long enough, too short and empty: all windows are used, none crosses an end."""
    sizes = {"a.py": 5, "b.py": 4, "c.py": 0, "d.py": 7}
    for index, (name, size) in enumerate(sizes.items()):
        (tmp_path / name).write_bytes(bytes([index]) * size)
    corpus = data.Corpus.of("train", tmp_path, tuple(sizes.items()), seq_length=4)
    windows = [corpus.window(1, sample) for sample in range(200)]
    assert {len(window) for window in windows} == {5}
    assert {window[0] for window in windows} == {0, 3} and all(len(set(window)) == 1 for window in windows)
    assert 20 < sum(window[0] == 0 for window in windows) < 90, "one window of four"


def test_text_that_is_too_short_or_shrinks_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"x" * 20)
    with pytest.raises(ValueError, match="choose a smaller one"):
        data.Corpus.of("train", tmp_path, (("a.py", 20),), seq_length=20)
    corpus = data.Corpus.of("train", tmp_path, (("a.py", 20),), seq_length=18)
    os.truncate(tmp_path / "a.py", 10)
    with pytest.raises(ValueError, match="became shorter"):
        corpus.batch(1, range(3))


@pytest.mark.parametrize(
    ("argv", "world", "words"),
    [
        (["--tensor-model-parallel-size", "3"], "4", "4 ranks cannot hold tensor x pipeline = 3"),
        (
            ["--num-layers", "3", "--pipeline-model-parallel-size", "2"],
            "2",
            "--num-layers 3 must be a multiple of --pipeline-model-parallel-size 2",
        ),
        (["--num-attention-heads", "3", "--hidden-size", "96", "--tensor-model-parallel-size", "2"], "2", "--num-attention-heads 3"),
        (["--hidden-size", "65"], "1", "--hidden-size 65 must be a multiple of --num-attention-heads 4"),
        (["--global-batch-size", "6"], "1", "must be a multiple of micro batch size x data parallel size = 8"),
        (["--micro-batch-size", "0"], "1", "0 is too small"),
        (["--save-interval", "x"], "1", "--save-interval"),
    ],
)
def test_bad_options_are_one_line(
    argv: list[str], world: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(SystemExit) as end:
        options.parse(argv)
    assert end.value.code == 2 and words in capsys.readouterr().err.splitlines()[-1]


def test_degrees_come_from_the_launcher_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WORLD_SIZE", "8"), ("FT_TP", "2"), ("FT_PP", "2")):
        monkeypatch.setenv(name, value)
    args = options.parse([])
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.data_parallel_size) == (2, 2, 2)
    assert options.parse(["--tensor-model-parallel-size", "4"]).data_parallel_size == 1


def test_the_documentation_names_the_modules_to_preload() -> None:
    assert options.PRELOAD in (Path(__file__).parents[2] / "docs" / "examples.md").read_text()


def test_manifest_is_plain_json(tmp_path: Path) -> None:
    manifest = json.loads((sealed(tmp_path) / storage.MANIFEST).read_text())
    assert manifest["files"]["b.bin"][0] == 7 and len(manifest["files"]["b.bin"][1]) == 64
