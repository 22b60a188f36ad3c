"""How good the timeout rule is: false kills and detection time on synthetic and recorded section durations, beside NVRx's rule.

    python bench/timeouts.py [--seed 0] [--quick] [--all]         --all: also the simpler rules of docs/adr/0004-timeout-rule.md

Each trace is played to each rule. A natural duration that the rule would have ended is a false kill (the occurrence is then tried again, at most three times, as
after a restart). At random occurrences a hang is supposed to begin at a random moment; its detection time is what the rule's limit leaves from there, plus the time
until its next look. One in 200
occurrences, at least 10 a trace; the same hangs for all. NVRx looks every 5 s at a random phase, ft-launch 20 times a second and needs two looks. Warm-up occurrences are judged by the
ceiling for both. No clock is read; the figures are the same at every run. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

from traces.families import Trace, recorded, synthetic
from traces.rules import MORE, RULES, Learner, Nvrx, _Simple

HANG_ONE_IN, HANGS_MIN = 200, 10
LENGTH = 24_000
TRIES = 3
TARGET_RATIO = 0.5


@dataclass(slots=True)
class Score:
    """What became of one rule on some traces. Times in seconds."""

    sections: int = 0
    kills: int = 0
    detections: list[float] = field(default_factory=list)

    def add(self, other: Score) -> None:
        """Both together."""
        self.sections += other.sections
        self.kills += other.kills
        self.detections += other.detections

    def figures(self) -> dict[str, float | int]:
        """False kills per million sections, detection median and 90th percentile."""
        times = sorted(self.detections)
        return {
            "sections": self.sections,
            "false_kills": self.kills,
            "false_kills_per_million": round(1e6 * self.kills / max(1, self.sections), 2),
            "detection_median_s": round(statistics.median(times), 3),
            "detection_p90_s": round(times[int(len(times) * 0.9)], 3),
        }


def noticed_s(limit_s: float, poll_s: float, phase: float) -> float:
    """Seconds after a section's start at which a look, every `poll_s` at `phase` (0 to 1), finds the limit passed (and a second look confirms it, where they are many)."""
    wait_s = (phase * poll_s - limit_s) % poll_s
    return limit_s + wait_s + (poll_s if poll_s < 1 else 0.0)


def play(trace: Trace, rule: Learner | Nvrx | _Simple, seed: str) -> Score:
    """One trace, one rule."""
    draw = random.Random(seed)
    score = Score(sections=sum(map(len, trace.segments)))
    hangs = sorted(draw.randrange(score.sections) for _ in range(max(HANGS_MIN, score.sections // HANG_ONE_IN)))
    index = 0
    for segment in trace.segments:
        if index:
            rule.restart()
        for at, duration_s in enumerate(segment):
            warm = at < trace.warmup
            limit_s = trace.ceiling_s if warm else rule.limit_s()
            while hangs and hangs[0] == index:
                hangs.pop(0)
                score.detections.append(noticed_s(limit_s, rule.poll_s, draw.random()) - draw.random() * min(duration_s, limit_s))
            if not warm:
                score.kills += false_kills(rule, duration_s, draw) if duration_s > limit_s else 0
                rule.learn(duration_s)
            index += 1
    return score


def false_kills(rule: Learner | Nvrx | _Simple, duration_s: float, draw: random.Random) -> int:
    """How often this rule ends an occurrence that would have ended by itself."""
    for tried in range(TRIES):
        limit_s = rule.limit_s()
        if duration_s <= limit_s or noticed_s(limit_s, rule.poll_s, draw.random()) >= duration_s:
            return tried
        rule.killed(limit_s)
    return TRIES


def measure(traces: Iterable[Trace], rules: dict[str, type[Learner | Nvrx | _Simple]]) -> dict[str, dict[str, Score]]:
    """family -> rule -> score."""
    found: dict[str, dict[str, Score]] = {}
    for number, trace in enumerate(traces):
        scores = found.setdefault(trace.family if trace.promised else f"({trace.family})", {name: Score() for name in rules})
        for name, make in rules.items():
            scores[name].add(play(trace, make(trace.ceiling_s), f"{number}/{trace.family}"))
    return found


def paired(scores: dict[str, Score]) -> float:
    """Median over the hangs of our detection time divided by NVRx's for the same hang."""
    return statistics.median(a / b for a, b in zip(scores["ft-launch"].detections, scores["nvrx"].detections, strict=True))


def table(found: dict[str, dict[str, Score]], rules: Iterable[str]) -> str:
    """A line a family: false kills per million, median and 90th percentile of the detection time for each rule; how long ours takes of NVRx's for the same hang."""
    names = list(rules)
    lines = [f"{'':34}" + "".join(f"{name:>26}" for name in names) + "   same hang,"]
    lines.append(f"{'family of traces':34}" + f"{'kills/M   p50 s   p90 s':>26}" * len(names) + "  ours / nvrx")
    for family, scores in found.items():
        cells = [scores[name].figures() for name in names]
        row = "".join(f"{c['false_kills_per_million']:>10.1f}{c['detection_median_s']:>8.1f}{c['detection_p90_s']:>8.1f}" for c in cells)
        lines.append(f"{family[:34]:34}{row}{paired(scores):>13.2f}")
    return "\n".join(lines)


def totals(found: dict[str, dict[str, Score]], rules: Iterable[str]) -> dict[str, Score]:
    """Over all families whose survival is promised."""
    total = {name: Score() for name in rules}
    for family, scores in found.items():
        if not family.startswith("("):
            for name, score in scores.items():
                total[name].add(score)
    return total


def checks(total: dict[str, Score]) -> list[tuple[str, float, float]]:
    """(what, reached, target) in order of weight. Both readings of "detection time, median, at most half": over the same hangs, and of the two medians."""
    ours, theirs = total["ft-launch"].figures(), total["nvrx"].figures()
    medians = float(ours["detection_median_s"]) / float(theirs["detection_median_s"])
    return [
        ("false kills", float(ours["false_kills"]), 0.0),
        ("detection time / NVRx's, median over the same hangs", round(paired(total), 4), TARGET_RATIO),
        ("median detection time / NVRx's median", round(medians, 4), TARGET_RATIO),
    ]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="one short trace of each family")
    parser.add_argument("--all", action="store_true", help="also the simpler rules")
    return parser.parse_args()


def main() -> int:
    """Prints the table, the targets and the JSON; 1 for a false kill. A quick run is too short to judge detection: it has hardly begun to learn."""
    options = parse()
    rules = {**RULES, **(MORE if options.all else {})}
    variants, length = (1, 3000) if options.quick else (5, LENGTH)
    found = measure([*synthetic(options.seed, variants, length), *recorded()], rules)
    total = totals(found, rules)
    print(table({**found, "all but (...)": total}, rules))
    reached = checks(total)[: 1 if options.quick else None]
    for what, value, target in reached:
        print(f"{'ok  ' if value <= target else 'MISS'} {what}: {value:g} (target <= {target:g})")
    families = {family: {name: score.figures() for name, score in scores.items()} for family, scores in found.items()}
    figures = {name: score.figures() for name, score in total.items()}
    judged = [{"name": what, "value": value, "limit": target, "passed": value <= target} for what, value, target in reached]
    print(json.dumps({"bench": "timeouts", "seed": options.seed, "checks": judged, "total": figures, "families": families}))
    return 0 if reached[0][1] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
