"""/metrics: parsed by Prometheus' own parser; names and units by its conventions; counters that never fall."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from ft_launcher.dashboard import source
from ft_launcher.dashboard.metrics import registry_of
from ft_launcher.dashboard.source import Source
from ft_launcher.state import document as doc
from tests.dashboard.runs import Run, storied

NOW = 1772358900.0
"""2026-03-01 09:55:00: 24.6 s after the storied run's last word."""
UNITS = ("_seconds", "_ratio", "_total", "_info")
COUNTS = {"ft_state_up", "ft_run_phase", "ft_ranks", "ft_nodes", "ft_spare_nodes", "ft_cycle", "ft_iteration", "ft_run_exit_code"}
COUNTS |= {"ft_section_timeout_learned", "ft_quarantined_devices", "ft_suspected_devices", "ft_budget_used", "ft_budget_limit"}
"""What has no unit."""

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture(autouse=True)
def _every_look_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "AGAIN_S", 0.0)


def samples(families: list[Metric]) -> Samples:
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


class Scraper:
    """One server's registry, scraped as Prometheus does."""

    def __init__(self, path: Path) -> None:
        self.registry = registry_of(Source(path), lambda: NOW)

    def families(self) -> list[Metric]:
        return list(parse(generate_latest(self.registry).decode()))

    def __call__(self) -> Samples:
        return samples(self.families())

    def value(self, name: str, **labels: str) -> float:
        return self()[(name, tuple(sorted(labels.items())))]


def test_what_a_storied_run_exposes(tmp_path: Path) -> None:
    storied(tmp_path)
    scrape = Scraper(tmp_path)
    found = scrape()

    def value(name: str, **labels: str) -> float:
        return found[(name, tuple(sorted(labels.items())))]

    assert value("ft_state_up") == 1
    assert value("ft_state_age_seconds") == pytest.approx(24.6, abs=0.01)
    assert value("ft_cycles_total") == 3
    assert value("ft_restarts_total", cause="hang") == 1
    assert value("ft_restarts_total", cause="crash") == 1
    assert value("ft_restarts_total", cause="node") == 0
    assert value("ft_recovery_seconds_count") == 2
    assert value("ft_recovery_seconds_sum") == pytest.approx(1.04)
    assert value("ft_recovery_seconds_bucket", le="0.5") == 1
    assert value("ft_recovery_seconds_bucket", le="1.0") == 2
    assert value("ft_detection_overshoot_seconds_count") == 1
    assert value("ft_detection_overshoot_seconds_sum") == pytest.approx(0.32)
    assert value("ft_section_hard_timeout_seconds", section="setup") == 600
    assert value("ft_section_soft_timeout_seconds", section="out-of-section") == 200
    assert value("ft_section_timeout_learned", section="step") == 1
    assert 1.0 < value("ft_section_recent_duration_seconds", section="step", statistic="median") < 2.0
    assert value("ft_iteration") == 4120
    assert value("ft_spare_nodes") == 0
    assert value("ft_quarantined_devices") == 1
    assert value("ft_suspected_devices") == 2
    assert value("ft_device_quarantine_end_time_seconds", node="node000", slot="7") > NOW
    assert value("ft_ranks", state="running") == 8
    assert value("ft_run_phase", phase="running") == 1
    assert value("ft_run_phase", phase="ending") == 0
    assert value("ft_incidents_total") == 2
    assert value("ft_repeated_iterations_total") == 140
    assert value("ft_budget_limit", kind="restarts") == 3
    assert math.isinf(value("ft_budget_limit", kind="stuck_cycles"))
    assert 0.9 < value("ft_goodput_ratio") < 1
    info = next(dict(labels) for (name, labels) in found if name == "ft_run_info")
    assert (info["run_id"], info["topology"]) == ("gpt-8b", "tp=2,cp=1,dp=2,pp=2")
    last = next(dict(labels) for (name, labels) in found if name == "ft_last_incident_info")
    assert (last["rank"], last["node"], last["slot"], last["cause"]) == ("5", "node000", "5", "hang")


def test_names_units_and_helps_follow_the_conventions(tmp_path: Path) -> None:
    run = storied(tmp_path)
    run.conclude("failed", 1, "restarts are used up")
    run.save()
    families = Scraper(tmp_path).families()
    assert len(families) > 20
    for family in families:
        assert re.fullmatch(r"ft_[a-z_]+", family.name), family.name
        assert family.documentation.endswith("."), family.name
        for sample in family.samples:
            base = re.sub(r"_(bucket|count|sum)$", "", sample.name) if family.type == "histogram" else sample.name
            assert base.endswith(UNITS) or base in COUNTS, sample.name
            assert (sample.name.endswith("_total")) == (family.type == "counter"), sample.name
            assert "quantile" not in sample.labels, "a summary's own label"
            assert "rank" not in sample.labels or family.name == "ft_last_incident_info", "ranks are counted, never listed"


def test_openmetrics_is_spoken_too(tmp_path: Path) -> None:
    storied(tmp_path)
    registry = registry_of(Source(tmp_path), lambda: NOW)
    text = openmetrics.generate_latest(registry).decode()
    assert text.endswith("# EOF\n")
    assert any(family.type == "info" for family in parse_openmetrics(text))


def test_counters_never_fall_while_the_file_forgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doc, "KEEP_CYCLES", 5)
    run = Run(tmp_path)
    scrape = Scraper(tmp_path)
    before: Samples = {}
    for cycle in range(20):
        run.later(10)
        run.start_cycle(iteration=cycle * 10, recovery_s=0.2 if cycle else None)
        run.save()
        scrape()
        run.progress(cycle * 10 + 12)
        run.find("hung", 3, 9.8, 9.3)
        run.end_cycle("hang" if cycle % 2 else "crash", 3, "it stood still")
        run.save()
        now = scrape()
        assert len(run.document["cycles"]) <= 5
        for key, value in before.items():
            if key[0].endswith(("_total", "_bucket", "_count", "_sum")):
                assert now[key] >= value, key
        before = now
    assert scrape.value("ft_cycles_total") == 20
    assert scrape.value("ft_restarts_total", cause="hang") == 10
    assert scrape.value("ft_recovery_seconds_count") == 19
    assert scrape.value("ft_detection_overshoot_seconds_count") == 20
    assert scrape.value("ft_repeated_iterations_total") == 19 * 2


def test_a_recovery_is_counted_once_it_is_final(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.start_cycle(iteration=0)
    run.end_cycle("crash", 0, "exit code 1")
    run.start_cycle(iteration=4)
    run._row(doc.CycleRecord(1, 0, run.t, iteration_start=None, recovery_s=0.08))
    run.save()
    scrape = Scraper(tmp_path)
    assert scrape.value("ft_recovery_seconds_count") == 0, "all ranks run, none has made a step"
    run._row(doc.CycleRecord(1, 0, run.t, iteration_start=4, recovery_s=0.7))
    run.line("recovered", 1, run.revision, seconds=0.7, iteration=4)
    run.save()
    assert scrape.value("ft_recovery_seconds_sum") == 0.7


def test_another_run_in_the_same_file_begins_anew(tmp_path: Path) -> None:
    storied(tmp_path)
    scrape = Scraper(tmp_path)
    assert scrape.value("ft_cycles_total") == 3
    other = Run(tmp_path, run_id="other")
    other.save()
    assert scrape.value("ft_cycles_total") == 0
    assert scrape.value("ft_restarts_total", cause="hang") == 0


def test_without_a_file_the_metrics_say_so(tmp_path: Path) -> None:
    scrape = Scraper(tmp_path / "ft_state.json")
    assert scrape.value("ft_state_up") == 0
    assert scrape.value("ft_state_read_failures_total") == 2
    run = storied(tmp_path)
    assert scrape.value("ft_state_up") == 1
    for name in ("ft_state.json", "ft_state.json.bak"):
        (tmp_path / name).unlink()
    found = scrape()
    assert found[("ft_state_up", ())] == 0
    assert found[("ft_cycles_total", ())] == 3, "the last good state stays"
    run.save()
    assert scrape.value("ft_state_up") == 1


def test_text_of_a_file_cannot_break_the_exposition(tmp_path: Path) -> None:
    run = Run(tmp_path)
    odd = 'a"b\\c\nd{e="f"} 1'
    run.document = doc.with_timeouts(run.document, {odd: doc.SectionTimeout(None, "none")}, run.t)
    run.document["run"]["script"] = odd
    run.save()
    found = Scraper(tmp_path)()
    assert found[("ft_section_hard_timeout_seconds", (("section", odd),))] == math.inf
