"""Whose fault it was. Every error a person can meet says what went wrong, whose it is and what to do now.

`ConfigError` is the user's (exit 2), `WorkerError` the training's, `PlatformError` a node's or the store's (its exit code travels with it), `BugError` ours:
it carries the story (the last events) so that a report can be acted upon.
"""

from __future__ import annotations

from collections.abc import Sequence


class FTError(Exception):
    """Base of all errors that the launcher raises on purpose; `exit_code` is the process's."""

    exit_code = 1


class ConfigError(FTError):
    """Bad usage or configuration: the message names the key, the value, what is allowed and what to do. Exit code 2."""

    exit_code = 2


class WorkerError(FTError):
    """The training script failed; `exit_code` is the code that the launcher passes on."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class PlatformError(FTError):
    """A node, the store or the operating system failed; `exit_code` 69 (store unreachable) or 75 (not enough healthy nodes), else 1."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class ReplacedError(PlatformError):
    """Another agent has this one's place: the job goes on without it, and is not its to conclude."""


class BugError(FTError):
    """An impossible transition or broken invariant: ours. Carries the story: the latest events, oldest first. Exit code 70 (EX_SOFTWARE)."""

    exit_code = 70

    def __init__(self, message: str, story: Sequence[str] = ()) -> None:
        lines = "".join(f"\n  {line}" for line in story)
        super().__init__(message + (f"\nwhat led there:{lines}" if lines else ""))
        self.story = tuple(story)
