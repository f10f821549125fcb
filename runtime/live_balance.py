"""What live balancing of one group is made of: its model of step time, its placement at the start, its rounds.

Not the rounds (runtime/rebalancing/) and not the decisions (moe/wide_ep/balancing/). Imported where experts move only:
with it comes the model's config. Units: bytes, bytes/s.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..models.families import load_config
from ..models.footprint import model_footprint
from ..moe.routing import RoutingConfig
from ..moe.wide_ep.balancing import Planner
from ..moe.wide_ep.balancing.load_steps import LEAST_TOKENS
from ..quant import parse_format, weight_scheme
from ..topologies import parse_topology
from ..topologies.cost import Ceilings
from ..topologies.exchange_choice import exchanges_to_join
from ..topologies.layer_cost import ExpertSize, LayerCost, TokenRows
from ..topologies.machine import rank_ceilings
from .config import EngineConfig
from .kernels import exchange_rule
from .messages import Ready
from .placements import expert_placement
from .processes.workers import Workers
from .rebalancing.balancer import Balancer

# Tests set this: tokens of a window, so that few requests fill one.
WINDOW_VARIABLE = "MOEWE_BALANCE_TOKENS"


def live_balancer(config: EngineConfig, ready: Ready, workers: Workers) -> Balancer:
    """Return what moves experts of the group of `workers` from now on; `ready` tells how fast it is."""
    model = load_config(Path(config.model.path))
    assert model.moe is not None, "a dense model has no experts to move"
    scheme = weight_scheme(config.model.quantization) if config.model.quantization else None
    footprint = model_footprint(model, name=config.model.model, dtype=parse_format(config.model.dtype), scheme=scheme)
    placement = expert_placement(config, model)
    size = ExpertSize(
        expert_bytes=footprint.expert_bytes,
        row_bytes=footprint.hidden_size * footprint.activation_itemsize,
        flops=6.0 * model.hidden_size * model.moe.expert_width,
    )
    cost = LayerCost(
        size,
        _ceilings(config, ready),
        placement.slot_ranges,
        placement.rank_domain.tolist(),
        experts=ready.links.experts if ready.links is not None else None,
        token=crossing_tokens(config, model.moe.routing),
    )
    balancer = Balancer(
        workers,
        Planner(start=placement, model=cost),
        top_k=model.moe.routing.top_k,
        expert_bytes=footprint.expert_bytes,
        least_tokens=int(os.environ.get(WINDOW_VARIABLE, LEAST_TOKENS)),
    )
    workers.balancer = balancer
    return balancer


def crossing_tokens(config: EngineConfig, routing: RoutingConfig) -> TokenRows:
    """Return which rows are of one token, and whether the exchange has one copy for all of them cross to a domain."""
    # Which exchange joins domains does not depend on kernels.
    rule = exchange_rule(config, parse_topology(config.parallel.topology), has_native=True)
    return TokenRows(
        top_k=routing.top_k,
        together="hierarchical" in exchanges_to_join(rule.grid, rule.facts),
        num_groups=routing.num_groups,
        top_groups=routing.top_groups,
    )


def _ceilings(config: EngineConfig, ready: Ready) -> Ceilings:
    """Return what a rank can do: as measured at the start; what nobody measured, as it is assumed."""
    rates = [rank["bfloat16"] for rank in ready.matrix_rates if "bfloat16" in rank]
    return rank_ceilings(
        on_host=config.parallel.device == "cpu",
        num_ranks=len(ready.memory_bandwidth),
        memory_bandwidth=sum(ready.memory_bandwidth) / len(ready.memory_bandwidth),
        matrix_rate=sum(rates) / len(rates) if rates else None,
        exchange=ready.links.exchanges[0] if ready.links is not None else None,
    )
