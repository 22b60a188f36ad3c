"""The configuration file: what is read as what, and what is refused with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from ft_launcher.edge.sources import LARGEST_FILE, read_file
from ft_launcher.errors import ConfigError
from tests.cli.edge import config


def texts(path: Path) -> dict[str, str]:
    return {name: setting.text for name, setting in read_file(str(path))}


def test_scalars_stay_the_text_that_stands_there(tmp_path: Path) -> None:
    """YAML 1.1 would make 246 of 4:6, False of no, 83 of 0123 and a date of 2026-01-01."""
    file = tmp_path / "a.yaml"
    file.write_text("nnodes: 4:6\nnode-id: no\nrun_id: 2026-01-01\nmax-restarts: 0123\nlearn-timeouts: false\nhealth-check: 'a: b'\n")
    assert texts(file) == {
        "nnodes": "4:6",
        "node-id": "no",
        "run-id": "2026-01-01",
        "max-restarts": "0123",
        "learn-timeouts": "false",
        "health-check": "a: b",
    }


def test_lists_and_mappings_become_the_flags_notation(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("tee: [0, 3]\ntimeouts:\n  setup: 5\n  +mine: 6\nforward-signals:\n  - USR1\n  - HUP\npreload: []\n")
    assert texts(file) == {"tee": "0,3", "timeouts": "setup=5,+mine=6", "forward-signals": "USR1,HUP", "preload": ""}


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_says_nothing(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    assert config(file=str(file)) == config()


BAD = {
    "unknown key": ("tp: 2\nmax-restart: 3\n", ":2: unknown key 'max-restart'; did you mean max-restarts?"),
    "far from any": ("zzz: 3\n", ":1: unknown key 'zzz'; the keys are the long options"),
    "twice": ("tp: 2\ntp: 4\n", ":2: tp is given twice"),
    "twice, other spelling": ("max-restarts: 2\nmax_restarts: 4\n", ":2: max-restarts is given twice"),
    "a list": ("- tp\n", "must be a mapping of option names"),
    "a word": ("hello\n", "must be a mapping of option names"),
    "not YAML": ("tp: [1\nx: }\n", "is not valid YAML"),
    "a tab": ("tp:\n\t- 1\n", ":2: is not valid YAML"),
    "two documents": ("tp: 1\n---\npp: 1\n", "is not valid YAML"),
    "nested": ("timeouts: {setup: {a: 1}}\n", ":1: timeouts: must be a value, a list of values or a mapping"),
    "list as key": ("? [a]\n: 1\n", ":1: unknown key"),
    "merge key": ("<<: {tp: 2}\n", ":1: unknown key '<<'"),
    "object": ("tp: !!python/object/apply:os.system ['true']\n", ":1: tp: 'true': must be a whole number"),
    "NUL": ("tp: \0\n", "is not valid YAML"),
    "deep": ("tp: " + "[" * 5000 + "\n", "is not valid YAML"),
    "password": ("store-password: x\n", "unknown key 'store-password'"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused_with_its_place(tmp_path: Path, case: str) -> None:
    text, message = BAD[case]
    file = tmp_path / "job.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        config(file=str(file))
    assert message in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bad_value_names_file_line_and_key(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("# ours\nmax-restarts: many\n")
    with pytest.raises(ConfigError) as caught:
        config(file=str(file))
    assert str(caught.value) == f"{file}:2: max-restarts: 'many': must be a whole number from 0 to 10000000"


@pytest.mark.parametrize("case", ["missing", "folder", "bytes", "huge", "endless", "NUL in the name"])
def test_unreadable(tmp_path: Path, case: str) -> None:
    path = {"missing": tmp_path / "no.yaml", "folder": tmp_path, "endless": Path("/dev/zero")}.get(case, tmp_path / "x.yaml")
    if case == "bytes":
        path.write_bytes(b"tp: \xff\xfe\n")
    if case == "huge":
        path.write_text("#" * (LARGEST_FILE + 1))
    with pytest.raises(ConfigError, match="--config"):
        read_file("a\0b" if case == "NUL in the name" else str(path))


def test_a_byte_order_mark_is_no_key(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(b"\xef\xbb\xbftp: 2\r\n")
    assert texts(file) == {"tp": "2"}
