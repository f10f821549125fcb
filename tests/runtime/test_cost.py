"""What tokens cost: exact quotients of a price, the clock and the tokens that clients got; nothing without a price."""

from __future__ import annotations

import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from moewe.runtime.messages import Delta
from moewe.runtime.metrics.cost import COST_METRICS, KINDS, cost_of, per_million
from moewe.runtime.metrics.export import Metrics


def scrape(metrics: Metrics) -> dict[tuple[str, str], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, s.labels.get("tokens", "")): s.value for family in families for s in family.samples}


def served(price: float | None, hours: float) -> Metrics:
    """A server that has been there for so long and served one prompt of 300 tokens with 100 of output."""
    metrics = Metrics(version="1", model="m", topology="EP1DP1", price_per_hour=price)
    metrics._began = time.monotonic() - 3600 * hours
    times = metrics.submitted(300)
    metrics.observe(times, Delta(request_id="a", token_ids=(1,) * 100, finish_reason="length"))
    return metrics


def test_a_million_tokens_cost_the_price_over_the_rate() -> None:
    # 7.2 an hour are 0.002 a second; at 1,000 tokens a second a million take 1,000 seconds
    assert cost_of(7.2, 1_000.0) == pytest.approx(2.0)
    assert per_million(cost_of(7.2, 10.0), 30_000, 10_000) == pytest.approx(
        {"prompt": 0.02 / 0.03, "output": 2.0, "all": 0.5}
    )
    assert per_million(1.0, 0, 0) == dict.fromkeys(KINDS)
    assert per_million(1.0, 500_000, 0) == {"prompt": 2.0, "output": None, "all": 2.0}


def test_a_server_with_a_price_tells_the_cost_since_its_start() -> None:
    values = scrape(served(price=3.0, hours=0.5))
    assert values["moewe_price_per_hour", ""] == 3.0
    assert values["moewe_cost_total", ""] == pytest.approx(1.5, rel=1e-3)
    found = {kind: values["moewe_cost_per_million_tokens", kind] for kind in KINDS}
    assert found == pytest.approx({"prompt": 5_000.0, "output": 15_000.0, "all": 3_750.0}, rel=1e-3)


def test_idle_time_costs_as_well() -> None:
    first, later = (scrape(served(price=3.0, hours=hours)) for hours in (1.0, 4.0))
    name = ("moewe_cost_per_million_tokens", "output")
    assert later[name] == pytest.approx(4 * first[name], rel=1e-3)


def test_before_the_first_token_there_is_a_cost_and_no_quotient() -> None:
    metrics = Metrics(version="1", model="m", topology="EP1DP1", price_per_hour=3.0)
    values = scrape(metrics)
    assert 0 <= values["moewe_cost_total", ""] < 3.0
    assert not any(name == "moewe_cost_per_million_tokens" for name, _ in values)


def test_without_a_price_nothing_is_said_of_cost() -> None:
    names = {name for name, _ in scrape(served(price=None, hours=1.0))}
    assert "moewe_generation_tokens_total" in names and not names & {metric.name for metric in COST_METRICS}
