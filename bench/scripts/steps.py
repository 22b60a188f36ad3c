"""The training that is interrupted: gloo, 20 ms of work and one all-reduce a step, for ever. The same file under every launcher, and bare.

`steps.py nvrx` marks its sections with NVRx's client instead of ours, where a benchmark needs that launcher to watch them.
"""

import time

FIRST_NS = time.monotonic_ns()

import os  # noqa: E402
import sys  # noqa: E402
from typing import Any  # noqa: E402

from stamp import stamp  # noqa: E402

stamp("line", FIRST_NS)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from monitors import client  # noqa: E402

STEP_S = 0.02
STEPS_A_CYCLE = 1_000_000


def nvrx_client() -> Any:
    """Imported only where it is wanted: it takes seconds."""
    import nvrx_client

    return nvrx_client.Client()


def main() -> None:
    """Train for ever."""
    mon: Any
    stamp("torch")
    mon = client.attach() if sys.argv[1:] != ["nvrx"] else nvrx_client()
    with mon.section("setup"):
        dist.init_process_group("gloo")
    stamp("group")
    gradient = torch.ones(256)
    first = STEPS_A_CYCLE * int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    parent = os.getppid()
    for iteration in range(first, first + STEPS_A_CYCLE):
        if os.getppid() != parent:
            os._exit(1)  # whoever started this is gone: no launcher leaves it behind, but a killed benchmark could
        with mon.section("step", iteration=iteration):
            time.sleep(STEP_S)
            dist.all_reduce(gradient)
            gradient.fill_(1.0)
        stamp("step")


if __name__ == "__main__":
    main()
