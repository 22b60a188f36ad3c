"""A little agent for the tests that kill one: owns a zygote, starts ranks, prints what happens as lines of JSON, and waits to be killed.

Arguments: a JSON object with `folder`, `script`, `ranks` and zygote options.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict

from ft_launcher.shell import strays
from ft_launcher.shell.process import Command, ProcessEvent, RankSpec, Zygote, ZygoteLost, ZygoteOptions, ZygoteReady


def say(event: ProcessEvent) -> None:
    sys.stdout.write(json.dumps({"event": type(event).__name__, **asdict(event)}) + "\n")
    sys.stdout.flush()


async def main() -> None:
    plan = json.loads(sys.argv[1])
    strays.become_subreaper()
    options = ZygoteOptions(command=Command(script=plan["script"]), cwd=plan["folder"], env=dict(os.environ), **plan.get("options", {}))
    lost = asyncio.Event()

    def on_event(event: ProcessEvent) -> None:
        say(event)
        if isinstance(event, ZygoteReady):
            specs = [RankSpec(rank=r, slot=r, log_path=f"{plan['folder']}/r{r}.log", env={"RANK": str(r)}) for r in range(plan["ranks"])]
            zygote.fork_ranks(1, specs)
        if isinstance(event, ZygoteLost):
            lost.set()

    zygote = Zygote(options, on_event)
    await zygote.start()
    await lost.wait()
    left = await zygote.close(1.0)
    sys.stdout.write(json.dumps({"event": "Closed", "left": left, "children": sorted(strays.children(os.getpid()))}) + "\n")


asyncio.run(main())
