"""The benchmarks are scripts, not a package: their folder is put on the path as Python itself does for `python bench/recovery.py`."""

from __future__ import annotations

import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))
