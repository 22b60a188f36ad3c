"""What a rank is given when it starts, and what it leaves when it has ended: its variables, its log, its error file, its stacks.

Planned in one go before the fork, so that nothing has to be worked out between a fault and the next start; read in one go after the end, on a thread that nobody has to
wait for, because a stalled disk may cost the words of a rank but never the restart. It knows where the files are; it starts nothing and judges nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ft_launcher.config import Config
from ft_launcher.core.evidence import RankError
from ft_launcher.core.placement import Placement
from ft_launcher.core.rerun_report import RerunFinding
from ft_launcher.core.state import JobState
from ft_launcher.shell.last_words import read_error
from ft_launcher.shell.nursery import RankPlan
from ft_launcher.shell.rank_env import rank_environment
from ft_launcher.shell.record import Files
from ft_launcher.shell.rejected_results import TrackerFile
from rerun.tracker import tracker_path

ERRORS_WAIT_S = 1.0
"""Last words that have not been read by then are not waited for."""

Words = Callable[[dict[int, RankError], dict[int, RerunFinding]], None]


class RankFiles:
    """The files of one agent's ranks."""

    def __init__(self, config: Config, files: Files) -> None:
        self._config = config
        self._files = files
        self._tracker = TrackerFile(tracker_path(config.command.args))
        self._ranks: tuple[int, ...] = ()

    def plan(
        self, job: JobState, placement: Placement, pages: Mapping[int, int], sockets: Mapping[int, Mapping[str, str]]
    ) -> list[RankPlan]:
        """A cycle begins: what each rank of this node starts with. `pages`: descriptors of the section pages; `sockets`: further variables."""
        self._tracker.begin()
        self._ranks = placement.ranks_on(self._config.node_id)
        return [
            RankPlan(
                rank=rank,
                slot=placement.slot_of(rank),
                log=self.log(job.cycle, rank),
                env=rank_environment(self._config, job, rank, self._error_file(job.cycle, rank)) | dict(sockets[rank]),
                page_fd=pages[rank],
                stacks=self._files.stacks(job.cycle, rank),
            )
            for rank in self._ranks
        ]

    def shown(self, cycle: int, ranks: Sequence[int]) -> dict[int, Path]:
        """The logs that people want to see on the console (`--tee`)."""
        return {rank: self.log(cycle, rank) for rank in ranks if self._config.tee.shows(rank)}

    def log(self, cycle: int, rank: int) -> Path:
        """Where the rank prints."""
        return self._files.folder.rank_log(cycle, rank)

    def _error_file(self, cycle: int, rank: int) -> Path:
        return self._files.folder.cycle_folder(cycle) / f"rank_{rank:05d}.error.json"

    def read_words(self, cycle: int, ranks: Sequence[int], answer: Words) -> None:
        """Call `answer` once, in the loop and within ERRORS_WAIT_S, with what these ranks said of their end, and what the tracker file says of any of ours.

        On a thread of its own, for the writer's may be waiting for an fsync.
        """
        loop = asyncio.get_running_loop()
        answered = False

        def once(errors: dict[int, RankError], reruns: dict[int, RerunFinding]) -> None:
            nonlocal answered
            if not answered:
                answered = True
                answer(errors, reruns)

        def read() -> None:
            found = {rank: read_error(self._error_file(cycle, rank), self.log(cycle, rank)) for rank in ranks}
            reruns = self._tracker.findings(self._ranks)
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(once, {rank: error for rank, error in found.items() if error is not None}, reruns)

        threading.Thread(target=read, name="ft-last-words", daemon=True).start()
        loop.call_later(ERRORS_WAIT_S, once, {}, {})
