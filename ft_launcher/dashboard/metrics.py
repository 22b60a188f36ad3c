"""`/metrics`: a run's state for Prometheus, read from the files when it is scraped.

Names and units follow Prometheus' conventions: `ft_` first, base units last (`_seconds`, `_ratio`), `_total` for what only grows, `_info` for texts. One target is one file, so nothing
carries the run's id but `ft_run_info`, to join with. Cardinality is bounded by sections, causes, phases and quarantined devices; ranks are counted by state, never listed.

The library keeps no state here: a collector of its own answers each scrape, in a registry of its own.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from ft_launcher.core.state import Phase
from ft_launcher.dashboard.losses import seconds_of
from ft_launcher.dashboard.moment import STATES, number, text, whole
from ft_launcher.dashboard.source import Snapshot, Source
from ft_launcher.dashboard.tally import Spread, Tally
from ft_launcher.state.document import Document, empty

CAUSES = ("hang", "crash", "node", "platform")
"""Causes that are exposed from the start, at 0, so that a first one is an increase."""
QUARANTINED_SHOWN = 100


class StateCollector(Collector):
    """Answers a scrape from `source`. `clock` gives seconds since the epoch."""

    def __init__(self, source: Source, clock: Callable[[], float] = time.time) -> None:
        self._source = source
        self._clock = clock
        self._tally = Tally()
        self._lock = threading.Lock()

    def describe(self) -> Iterable[Metric]:
        """Nothing is known before the first scrape; says so, so that registering reads no file."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families."""
        with self._lock:
            snapshot = self._source.look()
            self._tally.take(snapshot)
            families = [
                *_file(snapshot, self._clock(), self._source.failures),
                *_run(snapshot),
                *_counts(self._tally),
                *_sections(snapshot.document or empty()),
                *_hardware(snapshot.document or empty(), self._clock()),
            ]
        yield from families


def registry_of(source: Source, clock: Callable[[], float] = time.time) -> CollectorRegistry:
    """A registry with this one collector: none of the process's own metrics, none of anybody else's."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StateCollector(source, clock))
    return registry


def _file(snapshot: Snapshot, now_s: float, failures: int) -> Iterator[Metric]:
    yield _gauge(
        "ft_state_up",
        "1 while a usable ft_state.json is on the disk, else 0; the other metrics then are of the last good one.",
        float(snapshot.up),
    )
    yield CounterMetricFamily(
        "ft_state_read_failures", "Looks that found no usable ft_state.json, since this server started.", value=failures
    )
    written = seconds_of(((snapshot.document or empty())["run"] or {}).get("written"))
    if written is not None:
        yield _gauge("ft_state_age_seconds", "Time since ft_state.json last said something about the run.", max(0.0, now_s - written))


def _run(snapshot: Snapshot) -> Iterator[Metric]:
    document = snapshot.document or empty()
    run = document["run"]
    if not run:
        return
    yield _info(run)
    moment = snapshot.moment
    phases = _labelled("ft_run_phase", "1 for the phase that the run is in, 0 for the others.", "phase")
    for phase in sorted({*(p.value for p in Phase), moment.phase}):
        phases.add_metric([phase], float(phase == moment.phase))
    yield phases
    ranks = _labelled("ft_ranks", "Ranks by state.", "state")
    for letter, name in STATES.items():
        ranks.add_metric([name], float(snapshot.states.count(letter)))
    yield ranks
    for name, help_text, value in (
        ("ft_run_start_time_seconds", "When this launch of the run started, in seconds since the epoch.", seconds_of(run.get("started"))),
        ("ft_nodes", "Nodes that the run needs.", number(run.get("nodes"))),
        ("ft_spare_nodes", "Healthy nodes beyond those needed.", number(run.get("spares"))),
        ("ft_cycle", "Number of the running cycle, or of the last one; 0 is the first.", float(moment.cycle)),
        ("ft_iteration", "Training iteration as last published.", number(run.get("iteration"))),
        (
            "ft_goodput_ratio",
            "Share of the time since the first listed cycle that was neither outage nor work done twice.",
            snapshot.losses.goodput,
        ),
        ("ft_run_exit_code", "Exit code of the run, once it is over.", number(moment.exit_code)),
    ):
        if value is not None:
            yield _gauge(name, help_text, value)
    yield from _culprit(snapshot)


def _info(run: Mapping[str, Any]) -> Metric:
    labels = {"run_id": run.get("id"), "generation": run.get("generation"), "script": run.get("script"), "launcher": run.get("launcher")}
    topology = run.get("topology")
    shape = (
        ",".join(f"{name}={topology[name]}" for name in ("tp", "cp", "dp", "pp") if name in topology) if isinstance(topology, dict) else ""
    )
    return InfoMetricFamily("ft_run", "What runs.", value={**{k: _label(v) for k, v in labels.items()}, "topology": shape})


def _culprit(snapshot: Snapshot) -> Iterator[Metric]:
    latest = snapshot.latest
    if latest is None:
        return
    who = latest.culprit or {}
    value = {"cycle": _label(latest.cycle), "cause": latest.cause, **{key: _label(who.get(key)) for key in ("rank", "node", "slot")}}
    yield InfoMetricFamily(
        "ft_last_incident", "The newest incident and whose it was; rank, node and slot are empty where that could not be told.", value=value
    )


def _counts(tally: Tally) -> Iterator[Metric]:
    yield CounterMetricFamily("ft_cycles", "Cycles (attempts of the whole job) of this run id, over its launches.", value=tally.cycles)
    restarts = CounterMetricFamily("ft_restarts", "Cycles that ended and were followed by another, by cause.", labels=["cause"])
    for cause in sorted({*CAUSES, *tally.restarts}):
        restarts.add_metric([cause], tally.restarts[cause])
    yield restarts
    yield CounterMetricFamily("ft_incidents", "Incidents recorded in the run's folder.", value=sum(tally.incidents.values()))
    yield CounterMetricFamily("ft_repeated_iterations", "Iterations that were done again after a restart.", value=tally.repeated)
    yield _histogram("ft_recovery_seconds", "From a fault until every rank had completed a step of the next cycle.", tally.recovery)
    yield _histogram(
        "ft_detection_overshoot_seconds",
        "How far past its hard timeout the first hung rank of a cycle was when it was found.",
        tally.overshoot,
    )


def _sections(document: Document) -> Iterator[Metric]:
    hard = _labelled("ft_section_hard_timeout_seconds", "Time after which a rank in this section counts as hung; +Inf: never.", "section")
    soft = _labelled("ft_section_soft_timeout_seconds", "Time after which a rank in this section is suspected; +Inf: never.", "section")
    learned = _labelled("ft_section_timeout_learned", "1 where the timeout was learned, 0 where it is the fixed one.", "section")
    recent = GaugeMetricFamily(
        "ft_section_recent_duration_seconds",
        "Of the last 64 occurrences of the section.",
        labels=["section", "statistic"],
    )
    for name, section in sorted(document["sections"].items()):
        for family, key in ((hard, "hard_s"), (soft, "soft_s")):
            family.add_metric([name], math.inf if (value := number(section.get(key))) is None else value)
        learned.add_metric([name], float(section.get("learned") is True))
        distribution = section.get("distribution")
        window = distribution.get("recent") if isinstance(distribution, dict) else None
        for statistic, key in (("median", "p50_s"), ("p90", "p90_s"), ("max", "max_s")):
            if isinstance(window, dict) and (seconds := number(window.get(key))) is not None:
                recent.add_metric([name, statistic], seconds)
    yield from (hard, soft, learned, recent)


def _hardware(document: Document, now_s: float) -> Iterator[Metric]:
    until = GaugeMetricFamily(
        "ft_device_quarantine_end_time_seconds",
        "When the quarantine of this device ends, in seconds since the epoch.",
        labels=["node", "slot"],
    )
    ends = {
        device: end
        for device, known in document["hardware"].items()
        if (end := seconds_of(known.get("quarantine_until"))) is not None and end > now_s
    }
    for device, end in sorted(ends.items())[:QUARANTINED_SHOWN]:
        node, _, slot = device.rpartition("/")
        until.add_metric([node, slot], end)
    suspected = sum(1 for known in document["hardware"].values() if whole(known.get("suspicions"), 0) > 0)
    yield _gauge("ft_quarantined_devices", "Devices that no rank may use now.", float(len(ends)))
    yield _gauge("ft_suspected_devices", "Devices that something is held against.", float(suspected))
    yield until
    used = _labelled("ft_budget_used", "Used up of what is allowed, by kind.", "kind")
    limit = _labelled("ft_budget_limit", "Allowed, by kind; +Inf: without limit.", "kind")
    for kind, budget in sorted(document["budgets"].items()):
        used.add_metric([kind], number(budget.get("used")) or 0.0)
        limit.add_metric([kind], math.inf if (most := number(budget.get("limit"))) is None else most)
    yield from (used, limit)


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help_text, value=value)


def _labelled(name: str, help_text: str, label: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, help_text, labels=[label])


def _histogram(name: str, help_text: str, spread: Spread) -> Metric:
    buckets = [("+Inf" if math.isinf(bound) else repr(float(bound)), float(count)) for bound, count in spread.cumulative()]
    return HistogramMetricFamily(name, help_text, buckets=buckets, sum_value=spread.sum)


def _label(value: object) -> str:
    return (text(value) or "" if not isinstance(value, int) else str(value))[:200]
