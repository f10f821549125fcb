"""benchmarks/advisor.py tells right advice from wrong, and makes a model that no cache holds. Not how fast it is."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from moewe.runtime.auto_topology import domains_of
from moewe.topologies import parse_topology

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))  # the scripts import each other as neighbours
    import advisor

    return advisor


def test_scenarios_are_two_domains_and_another_layout(script: ModuleType, tmp_path: Path) -> None:
    for scenario in script.SCENARIOS.values():
        start, machine = parse_topology(scenario.start), domains_of(scenario.domains)
        assert start.num_ranks == machine.num_ranks == parse_topology(scenario.learn).num_ranks
        assert start.short() != scenario.expected
        assert not start.domains or (start.rate, start.delay) == (machine.rate, machine.delay)
        right = {"advised": scenario.expected, "gain": 0.3}
        assert script.is_right(right, scenario)
        assert not script.is_right(right | {"gain": 0.01}, scenario)
        assert not script.is_right({"advised": "stay"}, scenario)
        assert not script.is_right({"advised": start.short(), "gain": 0.3}, scenario)
    script.over_the_caches(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    of_layer = 3 * config["hidden_size"] * config["moe_intermediate_size"] * 2 * config["num_experts"]
    assert of_layer * config["num_hidden_layers"] >= 2.5 * script.llc_bytes()
