"""Real text at no start-up cost: the Python standard library's sources, a byte a token.

Knows: which files make the text, which of them are held out, and how sample number n becomes a window of bytes: by arithmetic on (seed, n),
so the position in the data is one integer, `consumed_samples`, and a restarted rank reads what its samples need and nothing else.
Must never know ranks or time: two processes with the same interpreter see the same text.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

VOCABULARY = 256
MAX_FILES = 120
MAX_FILE_BYTES = 200_000
HELD_OUT_EVERY = 10


@dataclass(frozen=True, slots=True)
class Corpus:
    """Files with their sizes, in order; a sample is a window of `seq_length + 1` bytes inside one of them.

    Windows are as wide as asked for, so files shorter than that have no window. `name` keeps the samples of two corpora apart.
    """

    name: str
    folder: Path
    files: tuple[tuple[str, int], ...]
    seq_length: int
    starts: tuple[int, ...]

    @classmethod
    def of(cls, name: str, folder: Path, files: tuple[tuple[str, int], ...], seq_length: int) -> Corpus:
        """Raises ValueError when no file is long enough for one sample."""
        windows = [max(0, size - seq_length) for _, size in files]
        if not sum(windows):
            raise ValueError(
                f"no file of {folder} holds --seq-length {seq_length} + 1 bytes ({name}, {len(files)} files): choose a smaller one"
            )
        return cls(name, folder, files, seq_length, tuple(itertools.accumulate(windows)))

    def window(self, seed: int, sample: int) -> bytes:
        """The bytes of one sample: the same for the same (seed, sample) in any process, uniform over all windows."""
        digest = hashlib.blake2b(f"{self.name}:{seed}:{sample}".encode(), digest_size=8).digest()
        position = int.from_bytes(digest) % self.starts[-1]
        which = bisect.bisect_right(self.starts, position)
        offset = position - (self.starts[which - 1] if which else 0)
        return _read(self.folder / self.files[which][0], offset, self.seq_length + 1)

    def batch(self, seed: int, samples: range) -> torch.Tensor:
        """Samples as int64 tokens, shape [len(samples), seq_length + 1]."""
        data = bytearray().join(self.window(seed, sample) for sample in samples)
        return torch.frombuffer(data, dtype=torch.uint8).view(len(samples), -1).long()

    def fingerprint(self) -> str:
        """Changes when the text may have changed: a resumed run must read what the first one read."""
        return hashlib.sha256(repr((self.files, self.seq_length)).encode()).hexdigest()[:16]


def standard_library(seq_length: int, folder: Path | None = None) -> tuple[Corpus, Corpus]:
    """Training and held-out corpus, split by file: every tenth file is never trained on. Raises ValueError when there is too little text."""
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    with os.scandir(folder) as entries:
        sources = sorted((e.name, e.stat().st_size) for e in entries if e.name.endswith(".py") and e.is_file())
    files = [source for source in sources if 0 < source[1] <= MAX_FILE_BYTES][:MAX_FILES]
    held_out = tuple(files[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])
    train = tuple(source for source in files if source not in held_out)
    return Corpus.of("train", folder, train, seq_length), Corpus.of("held-out", folder, held_out, seq_length)


def _read(path: Path, offset: int, count: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.pread(descriptor, count, offset)
    finally:
        os.close(descriptor)
    if len(data) != count:
        raise ValueError(f"{path} became shorter while training: {offset} + {count} bytes were expected")
    return data
