"""The ranks of one cycle on one node: who lives, who was asked or killed to end, who stamped an exception, and what an exit therefore says.

An exit after our own SIGKILL says nothing about the rank; one after a stamp failed when it stamped. It keeps book and answers; when to kill is the node machine's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ft_launcher.core.events import ExceptionStamped, RankEnded
from ft_launcher.core.evidence import RankExit, says_peer_lost

SIGKILL = 9
SIGTERM = 15
SIMULTANEOUS_NS = 20_000_000
"""A process's sockets close up to this long before its parent hears of its death (measured: about 10 ms with 400 MB mapped), so peers may fail 'first'."""


class LocalRanks:
    """`alive` are those whose end has not been heard of."""

    def __init__(self, ranks: Iterable[int] = ()) -> None:
        self.alive = set(ranks)
        self._killed: set[int] = set()
        self._asked: set[int] = set()
        self._stamps: dict[int, ExceptionStamped] = {}

    def stamped(self, event: ExceptionStamped) -> None:
        """A rank has an uncaught exception; the first one counts."""
        self._stamps.setdefault(event.rank, event)

    def ended(self, event: RankEnded, order: int) -> RankExit:
        """The rank is gone: what that says."""
        self.alive.discard(event.rank)
        stamp = self._stamps.get(event.rank) if event.code else None
        ours = (event.rank in self._killed and event.signal == SIGKILL) or (
            event.rank in self._asked and (event.signal == SIGTERM or event.code == 0)
        )
        return RankExit(
            rank=event.rank,
            code=event.code,
            signal=event.signal,
            failed_ns=stamp.at_ns if stamp else event.at_ns,
            order=order,
            ended=ours,
            core_dumped=event.core_dumped,
            stamp=stamp.text if stamp else None,
        )

    def vanished(self, order: int) -> list[RankExit]:
        """All that lived died with the zygote: nobody can say how, and it was not their doing."""
        gone, self.alive = sorted(self.alive), set()
        return [RankExit(rank, None, SIGKILL, failed_ns=0, order=order + i, ended=True) for i, rank in enumerate(gone)]

    def first_to_fail(self, exits: Mapping[int, RankExit]) -> set[int]:
        """Living ranks that had stamped an exception well before anybody ended: theirs is the cause, so their last words matter. Who tells of a lost peer is no cause: on a busy
        machine a process's sockets close long before its end is heard of.
        """
        first = min((e.failed_ns for e in exits.values() if e.failure), default=None)
        early = {r: s for r, s in self._stamps.items() if first is None or s.at_ns + SIMULTANEOUS_NS < first}
        return {r for r, s in early.items() if r in self.alive and not says_peer_lost(s.text)}

    def kill(self, ranks: Iterable[int]) -> list[int]:
        """These are being killed: the list, in order."""
        doomed = sorted(ranks)
        self._killed.update(doomed)
        return doomed

    def ask(self, ranks: Iterable[int]) -> list[int]:
        """These are being asked to end (SIGTERM): the list, in order."""
        asked = sorted(ranks)
        self._asked.update(asked)
        return asked

    @property
    def unkilled(self) -> set[int]:
        """Living ranks that no SIGKILL was sent to."""
        return self.alive - self._killed
