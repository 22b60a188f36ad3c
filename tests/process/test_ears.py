"""The launcher's ears, in a process of their own: no signal changes how it ends, none is lost, and nothing is said about them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

LOOPS = """
import asyncio, signal, sys, time
from ft_launcher.shell.ears import Ears

async def work(heard):
    ears.hear((signal.SIGTERM, signal.SIGINT), heard.append)
    while len(heard) < 3:
        await asyncio.sleep(0.001)

ears = Ears()
ears.overlook([signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
print("ready", flush=True)
for _ in range(100):
    heard = []
    asyncio.run(work(heard))
    assert set(heard) <= {signal.SIGTERM, signal.SIGINT}, heard
ears.close()
print("closed", flush=True)
time.sleep(0.1)
sys.exit(7)
"""


def start(code: str) -> subprocess.Popen[str]:
    """The child, once it has said that it is ready."""
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    if child.stdout.readline() != "ready\n":
        child.kill()
        raise AssertionError(child.communicate()[1])
    return child


def test_a_storm_of_signals_while_loops_end_neither_kills_nor_is_complained_of() -> None:
    """Loops end, the ears close and the interpreter ends in it. asyncio's own handlers die of the first loop's end, or complain of the wake-up descriptor."""
    child = start(LOOPS)
    try:
        deadline = time.monotonic() + 60
        while child.poll() is None and time.monotonic() < deadline:
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
                child.send_signal(number)
            time.sleep(0.0002)
        said, complained = child.communicate(timeout=10)
        assert (child.returncode, said, complained) == (7, "closed\n", "")
    finally:
        child.kill()
        child.communicate()


KEEPS = """
import asyncio, os, signal
from ft_launcher.shell.ears import Ears

async def work():
    ears, first, second = Ears(), [], []
    ears.hear([signal.SIGTERM], first.append)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.01)
    ears.leave()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    ears.hear([signal.SIGTERM, signal.SIGUSR1], second.append)
    os.kill(os.getpid(), signal.SIGUSR1)
    await asyncio.sleep(0.01)
    print([int(n) for n in first], [int(n) for n in second])
    ears.close()

print("ready", flush=True)
asyncio.run(work())
"""


def test_what_comes_while_nobody_listens_is_told_to_the_next() -> None:
    child = start(KEEPS)
    said, complained = child.communicate(timeout=60)
    assert (said, complained, child.returncode) == ("[15] [15, 15, 10]\n", "", 0)
