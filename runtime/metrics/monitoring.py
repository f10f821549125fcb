"""A Grafana dashboard and Prometheus alert rules, as files, from the tables of panels and metrics.

Not what is shown (runtime/metrics/panels.py). Grafana 10 and later read the dashboard, any Prometheus 2 or 3 the rules.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from .panels import ALERTS, ROWS, Panel
from .table import BY_NAME

_WIDTH, _HEIGHT, _PER_LINE = 8, 8, 3  # of a panel in Grafana's grid, which is 24 wide
_SUFFIXES = ("_bucket", "_count", "_sum")
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def metrics_of(expression: str) -> list[str]:
    """Return the names of our metrics in a PromQL expression, in order, each once; those of histograms without suffix.

    Example:
        >>> metrics_of("rate(moewe_queue_time_seconds_bucket[5m]) / moewe_kv_blocks")
        ['moewe_queue_time_seconds', 'moewe_kv_blocks']
    """
    found = []
    for name in re.findall(r"\bmoewe_\w+", expression):
        bare = next((name.removesuffix(end) for end in _SUFFIXES if name.endswith(end)), name)
        found.append(bare if bare in BY_NAME and BY_NAME[bare].kind == "histogram" else name)
    return list(dict.fromkeys(found))


def dashboard() -> str:
    """Return the dashboard as JSON."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS:
        panels.append(_placed({"type": "row", "title": title, "collapsed": False}, panels, 0, top, 24, 1))
        top += 1
        for i, panel in enumerate(row):
            column = i % _PER_LINE
            placed = _placed(_panel(panel), panels, column * _WIDTH, top, _WIDTH, _HEIGHT)
            panels.append(placed)
            if column == _PER_LINE - 1 or i == len(row) - 1:
                top += _HEIGHT
    document = {
        "title": "moewe",
        "uid": "moewe",
        "tags": ["moewe", "llm"],
        "timezone": "browser",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [
            {"name": "datasource", "label": "Source", "type": "datasource", "query": "prometheus"},
            {"name": "instance", "label": "Server", "type": "query", "datasource": _SOURCE, "multi": True,
             "includeAll": True, "refresh": 2, "query": "label_values(moewe_info, instance)",
             "current": {"text": "All", "value": "$__all"}},
        ]},
        "panels": panels,
    }  # fmt: skip
    return json.dumps(document, indent=2) + "\n"


def alert_rules() -> str:
    """Return the alert rules as YAML."""
    rules = [
        {
            "alert": alert.name,
            "expr": alert.expression,
            "for": alert.lasting,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "description": alert.advice},
        }
        for alert in ALERTS
    ]
    document = {"groups": [{"name": "moewe", "rules": rules}]}
    return yaml.safe_dump(document, sort_keys=False, width=1000)


def write_monitoring(folder: Path) -> tuple[Path, Path]:
    """Write both files into `folder`, which is made where it is missing; return their paths.

    Raises:
        ValueError: they cannot be written.
    """
    paths = folder / "moewe-dashboard.json", folder / "moewe-alerts.yml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, (dashboard(), alert_rules()), strict=True):
            path.write_text(text)
    except OSError as error:
        raise ValueError(f"{str(folder)!r} cannot be written: {error.strerror}; name a folder that can") from None
    return paths


def _panel(panel: Panel) -> dict[str, Any]:
    names = [name for expression, _ in panel.lines for name in metrics_of(expression)]
    texts = [
        f"`{name}`: {BY_NAME[name].meaning} When it is high: {BY_NAME[name].when_high}" for name in dict.fromkeys(names)
    ]
    least = {} if panel.goes_below_zero else {"min": 0}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": "\n\n".join(texts),
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, **least}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + i), "expr": expression, "legendFormat": legend, "datasource": _SOURCE}
            for i, (expression, legend) in enumerate(panel.lines)
        ],
    }


def _placed(
    panel: dict[str, Any], before: list[dict[str, Any]], left: int, top: int, width: int, height: int
) -> dict[str, Any]:
    return {"id": len(before) + 1, **panel, "gridPos": {"x": left, "y": top, "w": width, "h": height}}
