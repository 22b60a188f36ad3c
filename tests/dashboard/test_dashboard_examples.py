"""The Grafana dashboard and the alert rules use metrics, labels and values that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families as parse

from ft_launcher.dashboard.metrics import registry_of
from ft_launcher.dashboard.source import Source
from tests.dashboard.runs import storied

TREE = Path(__file__).resolve().parents[2]
RULES = TREE / "examples/prometheus/ft-launcher.rules.yml"
GRAFANA = TREE / "examples/grafana/ft-launcher.json"
_NAME = re.compile(r"\bft_[a-z_]+\b")
_MATCHER = re.compile(r"(ft_[a-z_]+)\{([^}]*)\}")


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    """Sample name -> its label sets, of a run that failed after two incidents."""
    run = storied(tmp_path_factory.mktemp("run"))
    run.conclude("failed", 1, "restarts are used up")
    run.save()
    found: dict[str, list[dict[str, str]]] = {}
    for family in parse(generate_latest(registry_of(Source(run.log_dir), lambda: 1772358900.0)).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(dict(sample.labels))
    return found


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(GRAFANA.read_text())
    return found


def expressions() -> Iterator[str]:
    yield from (rule["expr"] for rule in rules())
    shown = dashboard()
    for panel in shown["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (one["query"]["query"] for one in shown["templating"]["list"] if one["type"] == "query")
    yield from (one["expr"] for one in shown["annotations"]["list"])


def test_every_metric_used_exists(exposed: dict[str, list[dict[str, str]]]) -> None:
    used = {name for expression in expressions() for name in _NAME.findall(expression)}
    assert len(used) > 20
    assert used <= exposed.keys(), sorted(used - exposed.keys())


def test_every_metric_of_ours_is_on_the_dashboard_or_in_a_rule(exposed: dict[str, list[dict[str, str]]]) -> None:
    used = {name for expression in expressions() for name in _NAME.findall(expression)}
    unseen = {
        name
        for name in exposed
        if re.sub(r"_(bucket|sum|count)$", "", name) not in {re.sub(r"_(bucket|sum|count)$", "", one) for one in used}
    }
    assert unseen == {"ft_cycle", "ft_run_start_time_seconds", "ft_state_read_failures_total", "ft_section_timeout_learned"}


def test_labels_and_their_values_exist(exposed: dict[str, list[dict[str, str]]]) -> None:
    seen = 0
    for expression in expressions():
        for name, matchers in _MATCHER.findall(expression):
            for label, operator, value in re.findall(r'(\w+)(=~|=)"([^"]*)"', matchers):
                if label == "instance":
                    continue
                assert all(label in labels for labels in exposed[name]), (name, label)
                if "$" not in value:
                    wanted = value.split("|") if operator == "=~" else [value]
                    assert set(wanted) <= {labels[label] for labels in exposed[name]}, (name, label, value)
                    seen += 1
    assert seen >= 5


def test_the_rules_are_said_well() -> None:
    found = rules()
    assert len({rule["alert"] for rule in found}) == len(found)
    for rule in found:
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"]["summary"].startswith("{{ $labels.instance }}: ")


def test_the_dashboard_can_be_imported() -> None:
    shown = dashboard()
    assert shown["uid"] == "ft-launcher"
    assert len({panel["id"] for panel in shown["panels"]}) == len(shown["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in shown["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}"
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_promtool_accepts_rules_and_metrics(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool on PATH")
    result = subprocess.run([promtool, "check", "rules", str(RULES)], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    storied(tmp_path)
    text = generate_latest(registry_of(Source(tmp_path)))
    result = subprocess.run([promtool, "check", "metrics"], input=text.decode(), capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")
