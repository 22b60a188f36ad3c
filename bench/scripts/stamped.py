"""Runs another script and stamps when its `step` sections end, without changing it: `stamped.py SCRIPT ARGS`. For scripts that use `monitors.client`."""

import time

FIRST_NS = time.monotonic_ns()

import runpy  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from stamp import stamp  # noqa: E402

stamp("line", FIRST_NS)

from monitors import client  # noqa: E402


class Stamped:
    """A section that stamps when it has ended without an exception."""

    def __init__(self, section: Any) -> None:
        self._section = section

    def __enter__(self) -> Any:
        return self._section.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._section.__exit__(kind, error, trace)
        if kind is None:
            stamp("step")


def main() -> None:
    """Put the stamps in, and become the other script."""
    plain = client.Monitor.section

    def section(self: client.Monitor, name: str, iteration: int | None = None) -> Any:
        opened = plain(self, name, iteration)
        return Stamped(opened) if name == "step" else opened

    client.Monitor.section = section  # type: ignore[method-assign]
    sys.argv[:] = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
