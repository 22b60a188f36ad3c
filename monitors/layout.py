"""Where everything lies in a section page: the one place that both sides read.

A page is a memfd of `PAGE_BYTES`, seen as aligned 8-byte signed words. The rank writes what it is doing, the agent looks 20 times a second. No word depends on
another being written at the same time: a reader that catches a writer in the middle sees an old or a new word, never half of one, and what it makes of a mixed
picture is thrown away because a finding needs two equal samples. Where order matters the writer writes the deciding word last (a slot's section, a ring entry's
index, an exception's time) and takes it away first.

The first `HOT_BYTES` (header, open sections, statistics) fit one memory page, so that the agent sees with one comparison that nothing changed. Names, texts and
rings lie behind.

This file knows offsets and nothing else. It must never import anything: it is part of what `import monitors.client` costs.
"""

from __future__ import annotations

MEMFD_NAME = "ft-section-page"
ENV_PAGE = "FT_SECTION_PAGE"
ENV_STACKS_FD = "FT_STACKS_FD"
FD_PREFIX = "/proc/self/fd/"
LINK_PREFIX = "/memfd:" + MEMFD_NAME

MAGIC_WORD = int.from_bytes(b"ftsecpag", "little")
LAYOUT_VERSION = 1

# Header. The agent's words share a cache line apart from the rank's.
MAGIC, VERSION, OWNER_PID, RANK, CYCLE, LEASE_NS, REVOKED = range(7)
ATTACHED = 8
STACKS_SIGNAL = 9  # the signal on which this process dumps its stacks; 0: sending it would kill
ITERATION = 10  # -1: none yet
STEPS = 11
PROGRESS_NS = 12  # CLOCK_MONOTONIC
PROGRESS_BEGAN_NS = 13  # CLOCK_BOOTTIME at which the newest completed piece of progress began
EXCEPTION_NS = 16  # CLOCK_MONOTONIC; 0: none. Written last
EXCEPTION_BYTES = 17
RERUN_STATUS = 18  # 0: no report. Written last
RERUN_ITERATION = 19
RERUN_BYTES = 20
MISUSE = 24  # one counter for each name in MISUSES
MISUSES = ("unpaired_end", "restarted", "too_many_open", "too_many_names", "bad_name", "long_name", "bad_iteration", "internal")
HEADER_WORDS = 64

# Open sections: (section index + 1 or 0 when free, start, iteration or -1, unused).
OPEN = HEADER_WORDS
OPEN_SLOTS = 32
OPEN_WORDS = 4

# Statistics of a section: (occurrences, last duration, longest duration, CLOCK_MONOTONIC of the last end).
STATS = OPEN + OPEN_SLOTS * OPEN_WORDS
SECTIONS = 64
STATS_WORDS = 4
HOT_WORDS = STATS + SECTIONS * STATS_WORDS

# Names: a length byte and up to 47 bytes of UTF-8; length 0: no such section.
NAMES = 512
NAME_WORDS = 6
NAME_BYTES = NAME_WORDS * 8 - 1
EXCEPTION_TEXT = NAMES + SECTIONS * NAME_WORDS
TEXT_WORDS = 64
TEXT_BYTES = TEXT_WORDS * 8
RERUN_TEXT = EXCEPTION_TEXT + TEXT_WORDS

# Rings: for each section the last `RING` occurrences as (index + 1 or 0 when empty, duration in ns).
RINGS = RERUN_TEXT + TEXT_WORDS
RING = 128
RING_WORDS = RING * 2
PAGE_WORDS = RINGS + SECTIONS * RING_WORDS

HOT_BYTES = HOT_WORDS * 8
PAGE_BYTES = PAGE_WORDS * 8
