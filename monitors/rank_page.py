"""The section page as the rank's process sees it: find it, make sure that it is ours, write texts into it.

The environment variable alone proves nothing: it is inherited by every process that the rank starts. So the descriptor must be a memfd of the right name and size,
the header must be right, and its owner must be this very process; in any other (a DataLoader worker, a spawned child, a program that found something else
behind the number) there is no page. After `os.fork` the child's words point at private memory, so that no writer needs to ask who it is.

Must never raise into the training script, import torch or anything slow, or write a word of the agent's.
"""

from __future__ import annotations

import mmap
import os
import time

from monitors import layout


class RankPage:
    """This process's page. `words` is where to write; `shared` always is the real page, for reading what the agent wrote (in a forked child too)."""

    __slots__ = ("hooked", "shared", "words")

    def __init__(self, words: memoryview) -> None:
        self.words = words
        self.shared = words
        self.hooked = False

    def silence(self) -> None:
        """From now on every write goes to private memory."""
        self.words = scratch_words()

    def stamp_exception(self, kind: type[BaseException], error: BaseException | None) -> None:
        """Writes the time and `TypeError: message`, cut to `layout.TEXT_BYTES` bytes. Never raises."""
        try:
            text = _describe(kind, error)
            self.words[layout.EXCEPTION_NS] = 0
            self.words[layout.EXCEPTION_BYTES] = put_text(self.words, layout.EXCEPTION_TEXT, layout.TEXT_WORDS, text)
            self.words[layout.EXCEPTION_NS] = time.monotonic_ns()
        except Exception:  # noqa: BLE001  the hook that calls us must reach the user's own
            self.words[layout.MISUSE + layout.MISUSES.index("internal")] += 1

    def report_rerun(self, status: int, iteration: int, text: str) -> None:
        """Leaves the rerun state machine's report for the agent; `status` is its own code (not 0), `text` is cut to `layout.TEXT_BYTES` bytes."""
        self.words[layout.RERUN_STATUS] = 0
        self.words[layout.RERUN_ITERATION] = iteration
        self.words[layout.RERUN_BYTES] = put_text(self.words, layout.RERUN_TEXT, layout.TEXT_WORDS, text)
        self.words[layout.RERUN_STATUS] = status


def _describe(kind: type[BaseException], error: BaseException | None) -> str:
    try:
        message = str(error)
    except Exception:  # noqa: BLE001  a user's __str__ may do anything
        message = "<its message cannot be shown>"
    return f"{kind.__name__}: {message[: layout.TEXT_BYTES]}" if message else kind.__name__


def put_text(words: memoryview, at: int, room: int, text: str) -> int:
    """Writes `text` as UTF-8 into `room` words from word `at`; returns the number of bytes, cut at a character's end."""
    data = cut_utf8(text, room * 8)
    padded = data.ljust(-(-len(data) // 8) * 8, b"\0")
    for i in range(0, len(padded), 8):
        words[at + i // 8] = int.from_bytes(padded[i : i + 8], "little", signed=True)
    return len(data)


def cut_utf8(text: str, most: int) -> bytes:
    """`text` in at most `most` bytes of UTF-8, whole characters only; what cannot be encoded becomes `?`."""
    data = text.encode("utf-8", "replace")
    return data if len(data) <= most else data[:most].decode("utf-8", "ignore").encode()


def scratch_words() -> memoryview:
    """Private words of a page's shape, for a process that has no page."""
    return memoryview(bytearray(layout.PAGE_BYTES)).cast("q")


def claim(fd: int) -> None:
    """Makes the calling process the page's owner: called by the launcher in the rank's process, after the fork and before user code (with spawn: before exec,
    which keeps the pid). Raises ValueError when `fd` is no section page and OSError when it is no descriptor."""
    header = os.pread(fd, 16, 0)
    if header != _head():
        raise ValueError(f"descriptor {fd} is not a section page of layout {layout.LAYOUT_VERSION}: its first bytes are {header!r}")
    os.pwrite(fd, os.getpid().to_bytes(8, "little"), layout.OWNER_PID * 8)


def _head() -> bytes:
    return layout.MAGIC_WORD.to_bytes(8, "little") + layout.LAYOUT_VERSION.to_bytes(8, "little")


def own_page() -> RankPage | None:
    """This process's page, or None when it has none; once found, it is remembered until a fork."""
    page = _own.get("page")
    if page is None:
        try:
            found = _find(os.environ.get(layout.ENV_PAGE, ""))
        except Exception:  # noqa: BLE001  whatever is wrong with it, it is not ours, and training goes on
            return None
        page = None if found is None else _own.setdefault("page", found)
    return page


def _find(path: str) -> RankPage | None:
    number = path.removeprefix(layout.FD_PREFIX)
    if not path.startswith(layout.FD_PREFIX) or not (number.isascii() and number.isdigit()):
        return None
    fd = int(number)
    name = os.readlink(path)  # noqa: PTH115  pathlib would cost more than all of this
    if not name.startswith(layout.LINK_PREFIX) or os.fstat(fd).st_size != layout.PAGE_BYTES or os.pread(fd, 16, 0) != _head():
        return None
    if int.from_bytes(os.pread(fd, 8, layout.OWNER_PID * 8), "little") != os.getpid():
        return None
    return RankPage(memoryview(mmap.mmap(fd, layout.PAGE_BYTES)).cast("q"))


_own: dict[str, RankPage] = {}  # one entry; setdefault is indivisible


def _after_fork() -> None:
    for page in _own.values():
        page.silence()
    _own.clear()


os.register_at_fork(after_in_child=_after_fork)
