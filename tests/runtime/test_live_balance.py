"""What the model of live balancing is told of the group: which rows cross to another domain together."""

from __future__ import annotations

import pytest

from moewe.moe.routing import RoutingConfig
from moewe.runtime.config import EngineConfig, ModelOptions, ParallelOptions
from moewe.runtime.live_balance import crossing_tokens
from moewe.topologies.layer_cost import TokenRows

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
