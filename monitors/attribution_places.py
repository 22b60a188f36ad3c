"""What a stack says about a rank: it waits for others, it is held up by itself, or that cannot be known.

`Place` is the answer in a few words, small enough to travel in every node's report: `collective:all_reduce@tp mappings.py:_reduce`. Three kinds of evidence:
- *waiting*: inside a collective, a point-to-point call, a barrier or a rendezvous. Such a rank needs somebody else.
- *own*: in user code, a data loader, a file. Such a rank is needed by somebody else.
- *unsure*: behind the Python stack something unseen may wait: the device, autograd's threads, a work handle's `wait()`, a lock that another thread holds.

A call into C is invisible in a Python stack, so the source line of the innermost frame decides there; where it cannot be read the answer is *unsure*, never *own*. Frames are
known by the files of torch, gloo/NCCL's Python callers and Megatron-core (megatron.core 0.16, torch 2.4-2.13). Pure: the reader of source lines is handed in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from monitors.stacks import Frame, Thread, main_thread

Source = Callable[[str, int], str]
"""(file, line) -> the text of that line, empty when it cannot be read."""

WAITING = frozenset({"collective", "p2p", "barrier", "rendezvous"})
OWN = frozenset({"dataloader", "file", "user", "exit"})
UNSURE = frozenset({"device", "autograd", "wait", "lock", "unread"})

_C10D = "torch/distributed/distributed_c10d.py"
_TRANSPARENT = re.compile(
    r"^(torch/distributed/c10d_logger\.py|torch/utils/_contextlib\.py|torch/_dynamo/.*|contextlib\.py|functools\.py|threading\.py|selectors\.py"
    r"|multiprocessing/(connection|synchronize|popen_.*|process|context)\.py|concurrent/futures/.*|asyncio/.*|socket\.py|ssl\.py|monitors/client\.py)$"
)
_LOCKS = re.compile(
    r"^(threading\.py:(wait|acquire|join|_wait_for_tstate_lock)|concurrent/futures/.*:(result|wait|shutdown)|multiprocessing/.*:(wait|join|poll|acquire))$"
)
_FILES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("p2p", re.compile(r"^(megatron/core/pipeline_parallel/p2p_communication\.py|torch/distributed/pipelining/.*|deepspeed/runtime/pipe/p2p\.py)$")),
    ("collective", re.compile(r"^torch/distributed/(_functional_collectives(_impl)?\.py|nn/functional\.py|_symmetric_memory/.*)$")),
    ("rendezvous", re.compile(r"^torch/distributed/(rendezvous\.py|device_mesh\.py|elastic/.*)$")),
    ("device", re.compile(r"^torch/(cuda|xpu|accelerator|npu)/.*$")),
    ("autograd", re.compile(r"^torch/autograd/(graph|__init__)\.py$")),
    ("dataloader", re.compile(r"^(torch/utils/data/.*|queue\.py|multiprocessing/queues\.py)$")),
    (
        "file",
        re.compile(
            r"^(torch/serialization\.py|torch/distributed/checkpoint/(filesystem|_fsspec_filesystem)\.py|shutil\.py|tempfile\.py|pathlib\.py|zipfile\.py|tarfile\.py"
            r"|safetensors/.*|megatron/core/dist_checkpointing/strategies/(filesystem_async|async_utils|zarr)\.py|numpy/lib/.*(format|npyio).*)$"
        ),
    ),
    ("exit", re.compile(r"^(weakref\.py|multiprocessing/util\.py)$")),
)  # fmt: skip
_P2P = re.compile(r"^(i?send|i?recv)(_object_list)?$|^batch_isend_irecv$")
_BARRIER = re.compile(r"barrier$")
_RENDEZVOUS = re.compile(
    r"^_?(init_process_group|store_based_barrier|new_group.*|new_process_group_helper|new_subgroups.*|split_group|shutdown_backend|destroy_process_group)$"
)
_HINTS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("tp", re.compile(r"^megatron/core/tensor_parallel/")),
    ("pp", re.compile(r"^megatron/core/pipeline_parallel/p2p_communication\.py|^torch/distributed/pipelining/")),
    ("ep", re.compile(r"^megatron/core/transformer/moe/")),
    ("dp", re.compile(r"^megatron/core/distributed/|^torch/nn/parallel/distributed\.py|^torch/distributed/(fsdp|_composable)/")),
)
_WAIT_CALL = re.compile(
    r"\.\s*(wait|wait_tensor|synchronize|wait_stream|wait_event|item|cpu|tolist|numpy|to|result|block_until_ready)\s*\(|\bfloat\(|\bint\(|\bbool\("
)
_LOCK_CALL = re.compile(r"\.\s*(acquire|join)\s*\(|^\s*with\s+\S*lock\S*\s*:", re.IGNORECASE)
_FILE_CALL = re.compile(
    r"\b(open|fsync|fdatasync|sendfile|replace|rename|unlink|copyfile|flock|lockf)\s*\(|\.\s*(write|writelines|read|readline|flush|truncate)\s*\("
)
_TEXT = re.compile(r"^(\w+)(?::([^\s@]+))?(?:@(\w+))?(?: (\S.*))?$")
_LONGEST = 96


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands. `op`: the call (`all_reduce`), `group`: the kind of group it is known to serve (`tp`), `site`: who called, `train.py:step`."""

    kind: str
    op: str = ""
    group: str = ""
    site: str = ""

    @property
    def waiting(self) -> bool:
        """It needs somebody else."""
        return self.kind in WAITING

    @property
    def own(self) -> bool:
        """It is held up by itself."""
        return self.kind in OWN

    def __str__(self) -> str:
        head = self.kind + (f":{self.op}" if self.op else "") + (f"@{self.group}" if self.group else "")
        return f"{head} {self.site}"[:_LONGEST].rstrip()

    @classmethod
    def of(cls, text: str) -> Place | None:
        """The inverse of `str()`; None for an empty or foreign text."""
        found = _TEXT.match(text)
        return cls(found[1], found[2] or "", found[3] or "", found[4] or "") if found and found[1] in WAITING | OWN | UNSURE else None

    def words(self) -> str:
        """For a sentence: `waits in all_reduce (tp, mappings.py:_reduce)`, `is in user code (train.py:step)`."""
        where = ", ".join(part for part in (self.group, self.site) if part)
        return _WORDS[self.kind].format(op=self.op or self.kind) + (f" ({where})" if where else "")


_WORDS = {
    "collective": "waits in {op}",
    "p2p": "waits in {op}",
    "barrier": "waits in {op}",
    "rendezvous": "waits in {op}",
    "dataloader": "waits for data in {op}",
    "file": "is busy with a file",
    "user": "is in user code",
    "exit": "is in its own exit",
    "device": "waits for its device",
    "autograd": "is in autograd's backward pass",
    "wait": "is in a call that may wait for others",
    "lock": "waits for another of its threads",
    "unread": "is in code whose source cannot be read",
}


def place_of(threads: Sequence[Thread], source: Source) -> Place | None:
    """What a whole dump says of its rank: of its main thread, or where that only waits for others of its threads, of those. None without a main thread."""
    main = main_thread(threads)
    if main is None:
        return None
    others = [t for t in threads if t is not main and t.frames]
    place = classify(main.frames, source)
    if place.kind == "autograd":  # on a device, autograd calls back from threads of its own
        inside = [
            p
            for t in others
            if t.frames[-1].function not in ("_bootstrap", "_bootstrap_inner") and (p := classify(t.frames, source)).waiting
        ]
        return inside[0] if inside else place
    if place.kind in ("lock", "dataloader") and any(classify(t.frames, source).waiting for t in others):
        return Place("lock", place.op, "", place.site)
    if place.kind == "lock":
        return Place("user", place.op, "", place.site)
    return place


def classify(frames: Sequence[Frame], source: Source) -> Place:
    """What one thread's frames, innermost first, say. Without frames it is past its Python code: in its exit."""
    if not frames:
        return Place("exit", "no_python_frame")
    solid = [f for f in frames if not _TRANSPARENT.match(f.short)]
    if not solid:
        return Place("lock", frames[0].function)
    inner = solid[0]
    hint = next((word for f in solid for word, files in _HINTS if files.match(f.short)), "")
    if inner.short == _C10D:
        return _collective(solid, hint)
    kind = next((word for word, files in _FILES if files.match(inner.short)), None)
    if kind in ("p2p", "collective", "rendezvous"):
        return Place(kind, inner.function, hint, _site(solid))
    if kind is not None:
        op = f"{inner.short.removesuffix('.py').rpartition('/')[2]}.{inner.function}"
        return Place(kind, op, "", _site(solid, inner.short))
    if any(_LOCKS.match(f.name) for f in frames[: frames.index(inner)]):
        return Place("lock", frames[0].function, "", inner.brief)
    return _by_source(inner, solid, source, hint)


def _collective(solid: Sequence[Frame], hint: str) -> Place:
    """Inside torch.distributed: the outermost of its calls is what the script asked for."""
    run = 0
    while run < len(solid) and solid[run].short == _C10D:
        run += 1
    op = solid[run - 1].function
    pipeline = hint == "pp"
    kind = (
        "rendezvous"
        if _RENDEZVOUS.match(op)
        else "barrier"
        if _BARRIER.search(op)
        else "p2p"
        if _P2P.match(op) or pipeline
        else "collective"
    )
    return Place(kind, op, hint, _site(solid))


def _site(solid: Sequence[Frame], beside: str = _C10D) -> str:
    """Who called: the first frame that is neither torch.distributed's nor of the file `beside`."""
    caller = next((f for f in solid if f.short != beside and not f.short.startswith("torch/distributed/")), solid[-1])
    return caller.brief


def _by_source(inner: Frame, solid: Sequence[Frame], source: Source, hint: str) -> Place:
    """User code, or a call from it into C that waits."""
    line = source(inner.file, inner.line)
    if not line.strip():
        return Place("unread", "", "", inner.brief)
    if hint and re.search(r"\.\s*wait\s*\(", line):  # a work handle of a known communication layer
        return Place("p2p" if hint == "pp" else "collective", "wait", hint, inner.brief)
    if _WAIT_CALL.search(line):
        return Place("wait", "", "", inner.brief)
    if _LOCK_CALL.search(line):
        return Place("lock", "lock", "", inner.brief)
    return Place("file" if _FILE_CALL.search(line) else "user", "", "", inner.brief)
