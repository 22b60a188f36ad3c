"""The user's check command: what it says, how long it may take, and that nothing of it stays."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from ft_launcher.shell.health_command import Checked, Command
from tests.e2e.launch import gone

pytestmark = pytest.mark.serial


def run(text: str, limit_s: float = 60, **env: str) -> Checked:
    spare: set[int] = set()
    checked = asyncio.run(Command(text, spare).run({**os.environ, **env}, limit_s))
    assert spare == set()
    return checked


def pids(path: Path) -> list[int]:
    return [int(word) for word in path.read_text().split()]


def test_a_check_that_passes_says_nothing() -> None:
    assert run("echo fine; echo oops >&2").reason is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("exit 3", "exit 3"),
        ("echo one; echo 'two of 8 GPUs' >&2; echo; exit 1", "exit 1: two of 8 GPUs"),
        ("kill -9 $$", "was killed by SIGKILL"),
        ("no-such-command-here", "not found"),
        ("printf 'a\\033[31mb\\000c'; exit 1", "exit 1: a?[31mb?c"),
        ("head -c 3000 /dev/zero | tr '\\0' x; exit 1", "exit 1: " + "x" * 300),
        ("printf '\\377\\n'; exit 1", "exit 1: \ufffd"),
    ],
)
def test_a_check_that_fails_says_why(text: str, reason: str) -> None:
    said = run(text).reason or ""
    assert said.endswith(reason)
    assert len(said) < 350


def test_the_environment_reaches_it() -> None:
    assert run("echo $FT_NODE_ID/$FT_CYCLE/$FT_HEALTH_REASON; exit 1", FT_NODE_ID="a", FT_CYCLE="4", FT_HEALTH_REASON="restart").reason == (
        "exit 1: a/4/restart"
    )


def test_it_reads_nothing() -> None:
    assert run("cat").reason is None


def test_endless_output_does_not_stop_it(tmp_path: Path) -> None:
    """More than a pipe holds, and more than is kept."""
    assert run("head -c 20000000 /dev/zero; echo; echo the end; exit 1").reason == "exit 1: the end"


def test_one_that_does_not_end_is_killed_with_its_group(tmp_path: Path) -> None:
    told = tmp_path / "pids"
    text = f"trap '' TERM INT HUP; sleep 1000 & echo $! $$ > {told}; echo thinking; wait; wait"
    assert run(text, limit_s=0.5).reason == "did not end within 0.5 s: thinking"
    assert gone(pids(told))


def test_what_it_leaves_running_is_ended(tmp_path: Path) -> None:
    told = tmp_path / "pids"
    assert run(f"sleep 1000 & echo $! > {told}").reason is None
    assert gone(pids(told))


def test_one_that_leaves_its_session_and_holds_the_output_delays_nothing_and_is_ended(tmp_path: Path) -> None:
    """Its own child, too: both have become this process's by then."""
    told = tmp_path / "pids"
    daemon = f"echo $$ >> {told}; sh -c 'echo $$ >> {told}; sleep 1000; true'; true"
    checked = run(
        f'setsid sh -c "$DAEMON" & until [ $(wc -l < {told}) = 2 ]; do sleep 0.01; done 2>/dev/null; echo x; exit 4', DAEMON=daemon
    )
    assert checked.reason == "exit 4: x"
    assert len(pids(told)) == 2
    assert gone(pids(told))


def test_cut_short_it_leaves_nothing(tmp_path: Path) -> None:
    told = tmp_path / "pids"

    async def main() -> None:
        task = asyncio.create_task(Command(f"echo $$ > {told}.new; mv {told}.new {told}; sleep 1000", set()).run(os.environ, 60))
        while not told.exists():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert gone(pids(told))


def test_a_shell_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ft_launcher.shell.health_command.SHELL", "/no/such/shell")
    assert run("true").reason == "cannot be run: No such file or directory"
