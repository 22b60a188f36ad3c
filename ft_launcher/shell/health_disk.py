"""Says when the log folder is about to be full, before ranks lose what they print.

A full disk ends no job (`rank_output` sees to that in the ranks, the writer in the launcher), so it makes no node unfit either; but whoever reads the logs later must not have to guess.
Looked at by the writer thread, the only one that touches storage, once a minute: one line when room gets scarce, one when there is room again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from ft_launcher.shell.writer import Keep, Writer

LANE = "disk"
EVERY_S = 60.0
SCARCE_BYTES = 64 << 20
SCARCE_FILES = 100


class DiskSpace:
    """One log folder. `say` takes a line and a level, from the writer's thread."""

    def __init__(self, folder: Path, say: Callable[[str, str], None]) -> None:
        self._folder = folder
        self._say = say
        self._scarce = False

    async def watch(self, writer: Writer) -> None:
        """Look now and then, until cancelled."""
        while True:
            writer.submit(LANE, self.look, Keep.NEWEST)
            await asyncio.sleep(EVERY_S)

    def look(self) -> None:
        """Once; what cannot be asked is not scarce."""
        try:
            found = os.statvfs(self._folder)
        except OSError:
            return
        room, files = found.f_bavail * found.f_frsize, found.f_favail
        scarce = room < SCARCE_BYTES or (found.f_files > 0 and files < SCARCE_FILES)
        if scarce and not self._scarce:
            left = f"{room >> 20} MiB" if room < SCARCE_BYTES else f"{files} files"
            self._say(f"{self._folder}: room for {left} more; when it is full, training goes on and what ranks print is lost", "warning")
        elif self._scarce and not scarce:
            self._say(f"{self._folder}: there is room again", "info")
        self._scarce = scarce
