"""What the model of live balancing is told of the group: how fast it is, and which rows cross domains together."""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import pytest

from moewe.models.families import load_config
from moewe.moe.routing import RoutingConfig
from moewe.runtime.config import EngineConfig, ModelOptions, ParallelOptions
from moewe.runtime.live_balance import crossing_tokens, live_balancer
from moewe.runtime.messages import Ready
from moewe.runtime.processes.workers import Workers
from moewe.runtime.rebalancing.balancer import Balancer
from moewe.topologies.cost import ExpertSpeed
from moewe.topologies.exchange_cost import ExchangeCost, MeasuredLinks
from moewe.topologies.layer_cost import TokenRows
from moewe.topologies.machine import HOST_CEILINGS
from tests.support.fixtures import checkpoint

ROUTING = RoutingConfig(
    num_experts=16, top_k=4, scoring="sigmoid", renormalize=True, num_groups=4, top_groups=2, group_score="top2"
)


@pytest.mark.parametrize(
    ("topology", "exchange", "is_once"),
    [
        ("EP4DP1[domains=2+2]", "auto", True),
        ("EP4DP1[domains=2+2]", "hierarchical", True),
        ("EP4DP1[domains=2+2]", "all_to_all", False),
        ("EP4DP1", "auto", False),
    ],
)
def test_rows_of_a_token_cross_together_where_the_exchange_does_so(topology: str, exchange: str, is_once: bool) -> None:
    config = EngineConfig(
        model=ModelOptions(model="m", path="m"), parallel=ParallelOptions(topology=topology, exchange=exchange)
    )
    expected = TokenRows(top_k=4, together=is_once, num_groups=4, top_groups=2)
    assert crossing_tokens(config, ROUTING) == expected


def ready(links: MeasuredLinks | None) -> Ready:
    return Ready(
        num_blocks=8, block_size=16, max_model_len=64, max_num_seqs=4, memory_bandwidth=(4e9, 6e9), weight_bytes=(1, 1),
        weight_bytes_read=(1, 1), pids=(1, 2), matrix_rates=({"bfloat16": 1e12}, {"bfloat16": 3e12}), links=links,
    )  # fmt: skip


class NoWorkers:
    """Workers that nobody asks."""

    balancer: Balancer | None = None


def seconds_of(links: MeasuredLinks | None, rows: float) -> float:
    """A layer of T-MIX at EP2 in which each rank sends `rows` rows to each expert, by the model that a server uses."""
    config = EngineConfig(
        model=ModelOptions(model="T-MIX", path=str(checkpoint("T-MIX")), dtype="bfloat16"),
        parallel=ParallelOptions(topology="EP2DP1"),
    )
    balancer = live_balancer(config, ready(links), cast(Workers, NoWorkers()))
    planner = balancer._planner
    slots = planner.start.slot_of[0]  # [W, E]
    return planner.model.seconds(np.full(slots.shape, rows), slots)


def test_the_model_that_serves_knows_sizes_ceilings_and_links() -> None:
    """By hand: half of the experts on each rank, hit by rows of both; half of a rank's rows go to the other."""
    config = load_config(checkpoint("T-MIX"))
    assert config.moe is not None
    num_experts, numbers = config.moe.routing.num_experts, 3 * config.hidden_size * config.moe.expert_width
    rows = 2 * 40.0  # at an expert
    hit = num_experts / 2 * (1 - math.exp(-rows))
    experts = ExpertSpeed(byte_s=1e-9, flop_s=1e-11)
    cost = ExchangeCost(name="shm", fixed_s=2e-3, within_s=3e-9, between_s=0.0)
    computing = hit * numbers * 2 * 1e-9 + num_experts / 2 * rows * 2 * numbers * 1e-11
    sent = 2 * num_experts / 2 * 40.0 * config.hidden_size * 2  # out, and as many back
    known = seconds_of(MeasuredLinks(exchanges=(cost,), experts=experts), 40.0)
    assert known == pytest.approx(computing + sent * 3e-9 + 2e-3, rel=1e-6)
    assumed = seconds_of(None, 40.0)
    by_ceilings = max(hit * numbers * 2 / 5e9, num_experts / 2 * rows * 2 * numbers / 2e12)
    link = HOST_CEILINGS.within
    assert assumed == pytest.approx(by_ceilings + sent / link.bandwidth + 2 * link.latency, rel=1e-6)
