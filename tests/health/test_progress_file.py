"""Reading the iteration from a file: any content, any file, never blocking."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from ft_launcher.core.evidence import RankProgress
from ft_launcher.shell.progress_file import ProgressFile, iteration_in


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", None), (b"0", 0), (b"41", 41), (b"41\n", 41), (b" 41 \nmore", 41), (b"41 of 100", None), (b"-1", None), (b"1.5", None),
        (b"1e3", None), (b"\x00\x00", None), (b"\n41", None), (b"9" * 18, 10**18 - 1), (b"9" * 19, None), ("٣".encode(), None), (b"\xff", None),
    ],
)  # fmt: skip
def test_what_counts_as_a_number(data: bytes, expected: int | None) -> None:
    assert iteration_in(data) == expected


def read(path: Path, story: Callable[[ProgressFile], Awaitable[None]]) -> None:
    async def main() -> None:
        file = ProgressFile(path)
        try:
            await story(file)
        finally:
            file.close()

    asyncio.run(main())


def test_within_a_cycle_only_higher_numbers_count(tmp_path: Path) -> None:
    path = tmp_path / "iteration"

    async def story(file: ProgressFile) -> None:
        await file.fresh(30)
        assert file.iteration is None
        for written, known in (("120", 120), ("12", 120), ("", 120), ("garbage", 120), ("121", 121)):
            path.write_text(written)
            await file.fresh(30)
            assert file.iteration == known
        path.write_text("100")
        file.forget()
        assert file.iteration is None
        await file.fresh(30)
        assert file.iteration == 100
        path.unlink()
        await file.fresh(30)
        assert file.iteration == 100

    read(path, story)


@pytest.mark.parametrize("kind", ["folder", "pipe", "unreadable name"])
def test_what_is_no_file_tells_nothing_and_stalls_nobody(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("x" * 300 if kind == "unreadable name" else "it")
    if kind == "folder":
        path.mkdir()
    if kind == "pipe":
        os.mkfifo(path)

    async def story(file: ProgressFile) -> None:
        await file.fresh(30)
        assert file.iteration is None

    read(path, story)


def test_a_file_system_that_stalls_is_waited_for_only_so_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    stalled = threading.Event()
    monkeypatch.setattr("ft_launcher.shell.progress_file._read", lambda _: stalled.wait(60) and None)

    async def story(file: ProgressFile) -> None:
        await file.fresh(0.1)
        assert file.iteration is None
        stalled.set()

    read(tmp_path / "it", story)


def test_ranks_that_tell_their_own_iteration_keep_it(tmp_path: Path) -> None:
    path = tmp_path / "iteration"
    path.write_text("9")

    async def story(file: ProgressFile) -> None:
        await file.fresh(30)
        filled = file.fill({0: RankProgress(None, 0, None, 0.0, False), 1: RankProgress(5, 5, None, 0.0, True)})
        assert [p.iteration for p in filled.values()] == [9, 5]

    read(path, story)
