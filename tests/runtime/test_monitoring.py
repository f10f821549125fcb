"""The dashboard and the alert rules: metrics and labels that exist, in files that tools take."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
import yaml

from moewe.runtime.metrics.export import Metrics
from moewe.runtime.metrics.monitoring import alert_rules, dashboard, metrics_of, write_monitoring
from moewe.runtime.metrics.panels import ALERTS, ROWS
from moewe.runtime.metrics.table import BY_NAME
from tests.runtime.test_metrics import everything, scrape

EXPRESSIONS = [(panel.title, expression) for _, row in ROWS for panel in row for expression, _ in panel.lines]
EXPRESSIONS += [(alert.name, alert.expression) for alert in ALERTS]
# Of the scrape, not of the metric.
OF_PROMETHEUS = {"instance", "job", "le"}


def selectors(expression: str) -> list[tuple[str, dict[str, str]]]:
    """Return name and labels of each selector of ours in a PromQL expression; any instance is asked for."""
    found = re.findall(r"\b(moewe_\w+)(?:\{([^}]*)\})?", expression)
    return [(name, dict(re.findall(r'(\w+)="([^"]*)"', labels))) for name, labels in found]


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS)
def test_expressions_name_metrics_and_labels_that_exist(title: str, expression: str) -> None:
    names = metrics_of(expression)
    assert names and set(names) <= set(BY_NAME), (title, names)
    labels = {label for name in names for label in BY_NAME[name].labels} | OF_PROMETHEUS
    asked = set(re.findall(r"(\w+)=~?\"", expression))
    for group in re.findall(r"(?:by|on) \(([^)]*)\)", expression):
        asked |= set(group.split(", "))
    assert asked <= labels, (title, asked - labels)
    for name in names:
        counts = BY_NAME[name].kind == "counter"
        assert counts == bool(re.search(rf"(?:rate|increase)\({name}\b", expression)), (title, name)


def test_every_selector_finds_a_series(tmp_path: Path) -> None:
    """Values of labels, too: an alert that asks for a reason or scope that nobody exports stays silent for ever."""
    exported = [(name, dict(labels)) for name, labels in scrape(everything(tmp_path))]
    for title, expression in EXPRESSIONS:
        for name, asked in selectors(expression):
            assert any(name == have and asked.items() <= labels.items() for have, labels in exported), (title, name)


def test_every_metric_is_on_the_dashboard() -> None:
    shown = {
        name for _, row in ROWS for panel in row for expression, _ in panel.lines for name in metrics_of(expression)
    }
    # The list of servers, and alerts.
    assert set(BY_NAME) - shown == {"moewe_info", "moewe_ready", "moewe_start_time_seconds"}


def test_the_dashboard_is_a_document_of_grafana() -> None:
    document = json.loads(dashboard())
    panels = [panel for panel in document["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in document["panels"]}) == len(document["panels"])
    for panel in panels:
        assert panel["description"] and panel["targets"] and panel["datasource"]["uid"] == "${datasource}"
        names = {name for target in panel["targets"] for name in metrics_of(target["expr"])}
        below_zero = names & {"moewe_model_error_ratio", "moewe_advice_model_error_ratio", "moewe_balance_gain_seconds"}
        assert ("min" in panel["fieldConfig"]["defaults"]) != bool(below_zero), panel["title"]
    taken: set[tuple[int, int]] = set()
    for panel in document["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells


def test_alerts_say_what_to_do() -> None:
    rules = yaml.safe_load(alert_rules())["groups"][0]["rules"]
    assert [rule["alert"] for rule in rules] == [alert.name for alert in ALERTS]
    for rule in rules:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"]


def test_files_are_written_and_said(tmp_path: Path) -> None:
    written = write_monitoring(tmp_path / "new")
    assert [path.name for path in written] == ["moewe-dashboard.json", "moewe-alerts.yml"]
    assert written[0].read_text() == dashboard() and written[1].read_text() == alert_rules()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file' cannot be written"):
        write_monitoring(tmp_path / "file")


def test_a_server_that_began_anew_has_another_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def start_of(server: Metrics) -> float:
        return scrape(server)["moewe_start_time_seconds", ()]

    first = Metrics(version="1", model="m", topology="EP1DP1")
    began = start_of(first)
    assert began == start_of(first) and abs(began - time.time()) < 3600
    monkeypatch.setattr(time, "time", lambda: began + 9.0)
    assert start_of(Metrics(version="1", model="m", topology="EP1DP1")) == began + 9.0
