"""A rank that only says when it began (and, with `torch`, when it had torch) and stays."""

import time

FIRST_NS = time.monotonic_ns()

import sys  # noqa: E402

from stamp import stamp  # noqa: E402

stamp("line", FIRST_NS)
if "torch" in sys.argv[1:]:
    import torch  # noqa: F401

    stamp("torch")
while True:
    time.sleep(60)
