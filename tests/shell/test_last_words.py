"""What a failed rank said of itself, from whatever it left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ft_launcher.shell.last_words import MAX_TEXT, read_error

LOG = """epoch 1
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()
ValueError: loss is nan
"""


def test_the_error_file_of_torch_elastic_comes_first(tmp_path: Path) -> None:
    (tmp_path / "e.json").write_text(json.dumps({"message": {"message": "boom", "extraInfo": {"py_callstack": "trace", "timestamp": "1"}}}))
    (tmp_path / "log").write_text(LOG)
    error = read_error(tmp_path / "e.json", tmp_path / "log")
    assert error is not None
    assert (error.message, error.traceback) == ("boom", "trace")


def test_else_the_exception_in_the_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(LOG + "[W] some library's last words\n")
    error = read_error(tmp_path / "none", tmp_path / "log")
    assert error is not None
    assert error.message == "ValueError: loss is nan"
    assert error.traceback.startswith("Traceback")


@pytest.mark.parametrize("text", ["torn {", "[]", '{"message": 3}', "null", '{"message": {}}', "\x00\xff"])
def test_a_broken_error_file_is_no_account(tmp_path: Path, text: str) -> None:
    (tmp_path / "e.json").write_text(text, errors="surrogateescape")
    (tmp_path / "log").write_text("train.py: error: the following arguments are required: --data\n")
    error = read_error(tmp_path / "e.json", tmp_path / "log")
    assert error is not None
    assert error.message == "train.py: error: the following arguments are required: --data"


def test_nothing_at_all_is_none(tmp_path: Path) -> None:
    assert read_error(tmp_path / "a", tmp_path / "b") is None
    (tmp_path / "empty").write_text("\n\n")
    assert read_error(tmp_path / "a", tmp_path / "empty") is None


def test_huge_words_are_cut(tmp_path: Path) -> None:
    (tmp_path / "e.json").write_text(json.dumps({"message": "x" * 100_000}))
    error = read_error(tmp_path / "e.json", tmp_path / "log")
    assert error is not None
    assert len(error.message) == MAX_TEXT
