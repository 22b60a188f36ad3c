"""A monitor that writes down what is opened and closed, in place of a section page."""

from __future__ import annotations

from typing import Any


class Notebook:
    """`section` as `monitors.client.Monitor` has it."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def hook(self, name: str, global_step: int, sanity: bool) -> None:
        self.lines.append(f"hook {name} {global_step}{' sanity' if sanity else ''}")

    def section(self, name: str, iteration: int | None = None) -> Entry:
        return Entry(self, name, iteration)


class Entry:
    """One section."""

    def __init__(self, notebook: Notebook, name: str, iteration: int | None) -> None:
        self.notebook, self.name, self.iteration = notebook, name, iteration

    def __enter__(self) -> Entry:
        self.notebook.lines.append(f"open {self.name}{'' if self.iteration is None else f' {self.iteration}'}")
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.notebook.lines.append(f"close {self.name}{' ' + kind.__name__ if kind else ''}")
