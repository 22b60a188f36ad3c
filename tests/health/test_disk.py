"""Scarce room in the log folder is said once, and that it is over, too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ft_launcher.shell.health_disk import DiskSpace


class Disk:
    """What statvfs tells, and what was said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[tuple[str, str]] = []
        self.fields = {"f_bavail": 1 << 30, "f_frsize": 1, "f_files": 1000, "f_favail": 500}
        monkeypatch.setattr(os, "statvfs", lambda _: type("Found", (), self.fields))
        self.space = DiskSpace(Path("/logs"), lambda text, level: self.said.append((level, text)))

    def look(self, **fields: int) -> list[tuple[str, str]]:
        self.said.clear()
        self.fields |= fields
        self.space.look()
        return list(self.said)


def test_room_that_gets_scarce_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    assert disk.look() == []
    ((level, text),) = disk.look(f_bavail=3 << 20)
    assert level == "warning"
    assert text == "/logs: room for 3 MiB more; when it is full, training goes on and what ranks print is lost"
    assert disk.look(f_bavail=0) == []
    assert disk.look(f_bavail=1 << 30) == [("info", "/logs: there is room again")]


def test_files_run_out_too_but_not_where_they_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    assert disk.look(f_files=0, f_favail=0) == []
    ((_, text),) = disk.look(f_files=1000, f_favail=7)
    assert "room for 7 files more" in text


def test_what_cannot_be_asked_is_not_scarce(tmp_path: Path) -> None:
    said: list[str] = []
    DiskSpace(tmp_path / "gone", lambda text, _: said.append(text)).look()
    assert said == []
