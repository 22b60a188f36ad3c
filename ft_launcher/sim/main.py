"""`ft-launch simulate`: one run of the world, and what people and scripts read of it.

Exit 0 when every invariant held, 1 when one did not: then the one command that shows it again stands at the end, and the run in the notation of a
scenario file.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from ft_launcher.config import SimulateOptions
from ft_launcher.printing import out
from ft_launcher.sim.setting import FOREVER, UNLIMITED, Setting, setting_of
from ft_launcher.sim.world import World


def run(options: SimulateOptions) -> int:
    """Simulate as asked and print the result to stdout; returns the exit code. Raises ConfigError for a bad notation or impossible sizes."""
    world = World(setting_of(options))
    world.run()
    lines = [*(world.trace.lines() if options.story else ()), *summary(world)]
    if world.violations:
        lines += ["", *(f"VIOLATION {v.name}: {v.text}" for v in world.violations), f"again: {command(options)}"]
    if options.json:
        lines.append(json.dumps(as_json(world), separators=(",", ":")))
    out("\n".join(lines))
    return 1 if world.violations else 0


def command(options: SimulateOptions) -> str:
    """The one command that repeats the run."""
    words = ["ft-launch", "simulate", "--ranks", str(options.ranks)]
    words += ["--nodes", str(options.nodes)] if options.nodes is not None else []
    words += ["--hours", f"{options.hours:g}", "--seed", str(options.seed)]
    words += ["--faults", options.faults] if options.faults is not None else []
    return shlex.join([*words, "--story"])


def goodput(world: World) -> float:
    """Useful step time by total time: steps that are kept, each counted once, over the simulated hours."""
    return world.kept_steps * world.setting.script.step_s / (world.setting.hours * 3600)


def as_json(world: World) -> dict[str, Any]:
    """The last line of `--json`."""
    tally = world.tally
    return {
        "trace_sha256": world.trace.digest(),
        "restarts": tally.restarts,
        "violations": [violation.to_json() for violation in world.violations],
        "events": world.trace.count,
        "hours": world.setting.hours,
        "seed": world.setting.seed,
        "ranks": world.setting.ranks,
        "goodput": round(goodput(world), 6),
        "lost_steps": tally.lost_steps,
        "spares_used": tally.spares_used,
        "successions": tally.successions,
        "kept": tally.kept,
        "launches": tally.launches,
        "faults": dict(sorted(tally.faults.items())),
        "causes": dict(sorted(tally.causes.items())),
        "outcomes": dict(sorted(tally.outcomes.items())),
        "median_recovery_s": tally.median_recovery_s(),
    }


def summary(world: World) -> list[str]:
    """For people: the world in two lines, then what came of it."""
    setting, tally = world.setting, world.tally
    median = tally.median_recovery_s()
    facts = {
        "goodput": f"{goodput(world):.2%} of {setting.hours:g} h in steps that were kept ({world.kept_steps} steps of {setting.script.step_s:g} s)",
        "lost work": f"{tally.lost_steps} steps ({tally.lost_steps * setting.script.step_s / 3600:.2f} h)",
        "restarts": f"{tally.restarts} ({_counts(tally.causes)})",
        "recovery": "-"
        if median is None
        else f"median {median:.1f} s from the fault to the first step of all ranks ({setting.script.load_s:g} s of it loading)",
        "spares used": str(tally.spares_used),
        "controllers": f"{tally.successions} taken over; {tally.kept} times a node without a lease was kept",
        "launches": f"{tally.launches} ({_counts(tally.outcomes)})",
        "faults": f"{sum(tally.faults.values())} ({_counts(tally.faults)}; {tally.missed} struck nobody)",
        "events": str(world.trace.count),
    }
    return [*_world_lines(setting), *(f"  {name:12} {text}" for name, text in facts.items())]


def _world_lines(setting: Setting) -> Sequence[str]:
    script, options = setting.script, setting.options
    end = "endless" if script.steps >= FOREVER else f"{script.steps} steps"
    allowed = "unlimited" if options.max_restarts >= UNLIMITED else str(options.max_restarts)
    return (
        f"simulated {setting.hours:g} h, seed {setting.seed}: {setting.ranks} ranks on {setting.active} nodes x {setting.nproc} slots, {setting.spares} spares",
        f"  a step takes {script.step_s:g} s, a save {script.save_s:g} s every {script.save_every} steps, loading {script.load_s:g} s; {end}; "
        f"--max-restarts {allowed}",
    )


def _counts(counter: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counter.items(), key=lambda item: (-item[1], item[0]))) or "none"
