"""`ft-state show` and `validate` as an operator runs them: real processes, real pipes, files in every state."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from ft_launcher.dashboard.find import see
from ft_launcher.dashboard.show import tables
from ft_launcher.shell.incident import FirstCause, Incident, IncidentJob, Verdict, write_verdict
from ft_launcher.state import document as doc
from ft_launcher.state.file import FtStateFile
from ft_launcher.state.run_folder import create_run_folder

AT = "2025-03-01T10:00:00.000Z"
WHO = doc.Culprit(3, {"tp": 1, "cp": 0, "dp": 0, "pp": 1}, "node-a", 3, "killed first")
NASTY = "[red]boom[/red] \x1b[2J\x1b]0;title\x07 \ud800 漢 {x} :smile:"


def ft_state(*args: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ft_launcher.dashboard.cli", *map(str, args)]
    clean = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "FORCE_COLOR")}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**clean, **(env or {})}, check=False)


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    """A log-dir as a run leaves it: state, run folder with incident and verdict."""
    logs = tmp_path / "ft_logs"
    folder = create_run_folder(logs, "job7").path
    topology = {"tp": 2, "pp": 2, "dp": 1, "order": "tp-cp-ep-dp-pp"}
    made = doc.begin_run(None, doc.RunInfo("job7", 0, AT, "train.py", ("--name", NASTY), 4, 1, 4, topology, str(logs)))
    made = doc.with_cycle(made, doc.CycleRecord(0, 0, AT, AT, f"rank 3 was killed {NASTY}", "crash", "restart", WHO, 0.083, 0.004, 0, 17))
    made = doc.with_cycle(made, doc.CycleRecord(1, 0, AT))
    timeouts = {"step": doc.SectionTimeout(9.5, "learned from 200 samples"), "odd": doc.SectionTimeout(None, "no limit")}
    made = doc.with_timeouts(made, {**timeouts, doc.OUT_OF_SECTION: doc.SectionTimeout(300, "fixed")}, AT)
    made = doc.with_device(made, "node-a/3", suspicions=2, verdict={"at": AT, "verdict": "transient"}, quarantine_until=AT)
    made = doc.with_budget(doc.with_budget(made, "restarts", 1, 3), "moves", 0, None)
    made = doc.at_position(made, AT, cycle=1, phase="running", since=AT, iteration=42)
    FtStateFile(logs / "ft_state.json").save(made)
    IncidentJob(folder / "incidents", Incident(0, "crash", "rank 3 was killed", "restart in place", WHO, {}))()
    return logs


def test_show_says_everything_and_every_way_to_name_it_gives_the_same(log_dir: Path) -> None:
    results = [ft_state("show", path) for path in (log_dir, log_dir / "ft_state.json", log_dir / "job7.0")]
    for result in results:
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout == results[0].stdout
    text = results[0].stdout
    for part in (
        "job7, generation 0", "tp=2,pp=2,dp=1", "4 ranks on 1 node x 4 slots", "cycle 1, running since", "iteration 42", "learned from 200 samples", "never",
        "rank 3 was killed", "83 ms", "4 ms", "0..17", "rank 3 (tp=1,cp=0,dp=0,pp=1) on", "Incidents (last 1 of 1)", "restart in place", "node-a/3",
        "transient", "unlimited", "restarts", "out-of-section",
    ):  # fmt: skip
        assert part in text, part
    assert max(len(line) for line in text.splitlines()) <= 140


def test_a_log_dir_that_is_called_like_a_run_folder_is_a_log_dir(log_dir: Path) -> None:
    named = log_dir.rename(log_dir.with_name("logs-v1.2"))
    result = ft_state("show", named)
    assert result.returncode == 0
    assert "Incidents (last 1 of 1)" in result.stdout
    assert "incidents and verdict are of" not in result.stderr


@pytest.mark.parametrize("words", ["show", "show --json", "watch --once", "validate", "--help"])
def test_a_closed_standard_output_is_no_traceback(log_dir: Path, words: str) -> None:
    where = "" if words == "--help" else f" {log_dir}"
    command = f"exec {sys.executable} -m ft_launcher.dashboard.cli {words}{where} >&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_text_in_the_file_cannot_drive_the_terminal(log_dir: Path) -> None:
    text = ft_state("show", log_dir).stdout
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]boom[/red]" in text
    assert "\\x1b[2J" in text
    assert ":smile:" in text
    assert "漢" in text


def test_the_verdict_is_shown_and_a_run_folder_of_another_launch_is_said(log_dir: Path) -> None:
    write_verdict(
        log_dir / "job7.0", Verdict("failed", 93, "no progress in 3 cycles", 4, FirstCause(3, WHO.coords, "node-a", 3, "crash", -9))
    )
    text = ft_state("show", log_dir).stdout
    assert "failed, exit code 93: no progress" in text
    assert "first cause" in text
    other = create_run_folder(log_dir, "job7").path
    result = ft_state("show", other)
    assert result.returncode == 0
    assert "generation 1" in result.stderr
    assert "exit code 93" not in result.stdout
    assert "but job7.1  has no verdict.json: it still runs, or its launcher was killed (all above is of the run" in " ".join(
        result.stdout.split("\n")
    )
    write_verdict(other, Verdict("failed", 75, "not enough healthy nodes", 1, None))
    text = ft_state("show", other).stdout
    assert re.search(r"^but job7\.1 +failed, exit code 75: not enough healthy nodes \(all above is of the run", text, re.MULTILINE)
    assert not re.search(r"^outcome", text, re.MULTILINE)
    assert re.search(r"^but +no word of the launcher since", text, re.MULTILINE), "the state's own run is not over"


def test_json_is_the_document(log_dir: Path) -> None:
    assert json.loads(ft_state("show", "--json", log_dir).stdout) == json.loads((log_dir / "ft_state.json").read_text())


def test_the_default_is_the_log_dir_of_the_working_directory(log_dir: Path) -> None:
    command = [sys.executable, "-m", "ft_launcher.dashboard.cli", "show"]
    result = subprocess.run(command, cwd=log_dir.parent, capture_output=True, text=True, timeout=120, check=False)
    assert "job7, generation 0" in result.stdout


def test_a_copy_elsewhere_and_a_foreign_rewrite_are_shown_as_far_as_they_go(log_dir: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(log_dir / "ft_state.json", elsewhere / "copied.json")
    shutil.move(log_dir, tmp_path / "moved")
    result = ft_state("show", elsewhere / "copied.json")
    assert (result.returncode, result.stderr) == (0, "")
    assert "not here" in result.stdout
    (elsewhere / "copied.json").write_text('{"current_timeouts": {"section": {"section": {"step": 4.25}, "out_of_section": null}}}')
    result = ft_state("show", elsewhere / "copied.json")
    assert result.returncode == 0
    assert "4.2 s" in result.stdout
    assert "NVRx" in result.stdout
    assert ft_state("validate", elsewhere / "copied.json").returncode == 1


def test_a_torn_file_is_shown_from_the_copy_with_a_word_about_it(log_dir: Path) -> None:
    (log_dir / "ft_state.json").write_text('{"schema": "ft-st')
    result = ft_state("show", log_dir)
    assert result.returncode == 0
    assert "last good copy" in result.stderr
    assert "job7" in result.stdout


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"17", b'{"schema": "ft-state/9"}', b"\xff\xfe", b"[" * 100_000, b'{"a": NaN}', b'{"a": 1}']
)
def test_a_bad_file_is_one_line_and_exit_2(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad\x1b[31m.json"
    path.write_bytes(content)
    shown = ft_state("show", path)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr.count("\n") == 1
    assert "\x1b" not in shown.stderr
    checked = ft_state("validate", path)
    assert checked.returncode in (1, 2)
    assert "Traceback" not in checked.stderr
    assert "\x1b" not in checked.stdout + checked.stderr


BAD_USAGE = [
    ("show", "/no/such"),
    ("show", "/proc"),
    ("validate", "/no/such"),
    ("show", "a\nb"),
    ("nope",),
    ("show", "--bad"),
    ("show", "x" * 5000),
]


@pytest.mark.parametrize("args", BAD_USAGE)
def test_bad_usage_is_one_line_and_exit_2(args: tuple[str, ...]) -> None:
    result = ft_state(*args)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr


def test_validate_names_each_error_by_its_json_path(log_dir: Path) -> None:
    good = ft_state("validate", log_dir)
    assert (good.returncode, good.stderr) == (0, "")
    assert "valid" in good.stdout
    path = log_dir / "ft_state.json"
    document = json.loads(path.read_text())
    document["cycles"][0]["n"] = -1
    document["run"]["generation"] = "two"
    path.write_text(json.dumps(document))
    bad = ft_state("validate", path)
    assert bad.returncode == 1
    lines = bad.stdout.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("$.cycles[0].n: ")
    assert any(line.startswith("$.run") for line in lines)


def test_whatever_fits_json_is_shown_without_a_traceback(log_dir: Path) -> None:
    document = json.loads((log_dir / "ft_state.json").read_text())
    odd = [None, True, 1e300, "x", [[]], {"a": {"b": []}}]
    (log_dir / "ft_state.json.bak").unlink()
    for key in ("run", "sections", "cycles", "hardware", "budgets", "earlier_runs", "dropped", "current_timeouts"):
        for value in odd:
            for candidate in (value, [value], {"a": value}, *mangled(document[key], value)):
                (log_dir / "ft_state.json").write_text(json.dumps({**document, key: candidate}))
                seen = see(log_dir)
                with open(os.devnull, "w") as nowhere:
                    Console(file=nowhere).print(*tables(seen))


def mangled(section: object, value: object) -> list[object]:
    """The section with one of its values, at any depth of two, replaced."""
    if isinstance(section, list):
        return [[made, *section[1:]] for made in mangled(section[0], value)] if section else []
    if not isinstance(section, dict):
        return [value]
    return [{**section, key: value} for key in section] + [
        {**section, key: made} for key, inner in section.items() if isinstance(inner, dict | list) for made in mangled(inner, value)
    ]


def test_a_reader_that_leaves_early_is_no_error(log_dir: Path) -> None:
    for command in ("show", "show --json"):
        line = f"{sys.executable} -m ft_launcher.dashboard.cli {command} {log_dir} | true; echo ${{PIPESTATUS[0]}}"
        result = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120, check=False)
        assert result.stderr == ""
        assert result.stdout == "0\n"


def test_a_full_disk_behind_stdout_is_one_line(log_dir: Path) -> None:
    line = f"{sys.executable} -m ft_launcher.dashboard.cli show {log_dir} > /dev/full"
    result = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2
    assert result.stderr == "ft-state: standard output cannot be written: No space left on device\n"


def test_output_survives_an_ascii_locale_and_a_narrow_terminal(log_dir: Path) -> None:
    plain = ft_state("show", log_dir, env={"PYTHONIOENCODING": "ascii", "LC_ALL": "C"})
    assert plain.returncode == 0
    assert plain.stdout.isascii()
    narrow = ft_state("show", log_dir, env={"COLUMNS": "40"})
    assert narrow.returncode == 0
    assert max(len(line) for line in narrow.stdout.splitlines()) <= 40


def test_a_terminal_gets_colours_and_no_control_characters_of_the_files(log_dir: Path) -> None:
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "ft_launcher.dashboard.cli", "show", str(log_dir)]
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"}
    with subprocess.Popen(command, stdout=follower, stdin=subprocess.DEVNULL, env=env) as child:
        os.close(follower)
        shown = b""
        try:
            while data := os.read(leader, 65536):
                shown += data
        except OSError:
            pass
    os.close(leader)
    assert child.returncode == 0
    assert b"\x1b[1m" in shown
    assert b"\x1b[2J" not in shown


def test_show_never_writes(log_dir: Path) -> None:
    (log_dir / "ft_state.json").write_text("torn")
    before = sorted((str(path), path.stat().st_mtime_ns) for path in log_dir.rglob("*"))
    ft_state("show", log_dir)
    ft_state("validate", log_dir)
    assert sorted((str(path), path.stat().st_mtime_ns) for path in log_dir.rglob("*")) == before
