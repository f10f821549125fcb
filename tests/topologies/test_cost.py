"""The model of a step: bytes of the right ranks, links of the right width, and directions that must hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moewe.topologies import ModelFootprint, Topology, make_topology, parse_topology
from moewe.topologies.cost import Ceilings, Link, StepCost, Workload, expected_hit, step_cost
from tests.topologies.test_budget import DENSE, MODEL

CEILINGS = Ceilings(
    memory_bandwidth=1e9, flops=1e12, within=Link(bandwidth=1e9, latency=0.0), between=Link(bandwidth=1e8, latency=0.0)
)


def cost(topology: Topology | str, *, rows: float = 8, context: int = 0, domain_size: int = 8, model=MODEL) -> StepCost:
    if isinstance(topology, str):
        topology = parse_topology(topology)
    return step_cost(model, topology, Workload(rows=rows, context=context), CEILINGS, domain_size=domain_size)


def test_one_rank_reads_everything_that_is_hit() -> None:
    many = cost("EP1DP1", rows=1000)
    assert many.expert_bytes == pytest.approx(MODEL.routed_bytes)
    assert many.shared_bytes == MODEL.replicated_bytes  # the head is the embedding
    assert many.exchange_seconds == 0
    one = cost("EP1DP1", rows=1)
    assert one.expert_bytes == MODEL.num_moe_layers * MODEL.top_k * MODEL.expert_bytes


def test_a_rank_of_a_group_reads_its_experts_as_all_rows_hit_them() -> None:
    assert cost("EP4DP1", rows=12).expert_bytes == pytest.approx(cost("EP1DP1", rows=12).expert_bytes / 4)
    assert cost("EP4DP1", rows=12).shared_bytes == cost("EP1DP1", rows=12).shared_bytes
    assert cost("EP1DP4", rows=12).expert_bytes == pytest.approx(cost("EP1DP1", rows=3).expert_bytes)


def test_heads_over_ranks_divide_attention_and_kv_as_far_as_there_are_heads() -> None:
    def model(num_heads: int, kind: str = "full", **changes: object) -> ModelFootprint:
        group = replace(MODEL.kv_groups[0], num_heads=num_heads, kind=kind)
        return replace(MODEL, kv_groups=(group,), **changes)  # type: ignore[arg-type]

    whole, split = (cost(topology, context=100, model=model(8)) for topology in ("EP4DP1", "EP4DP1[atp=4]"))
    assert whole.shared_bytes - split.shared_bytes == MODEL.attention_bytes * 3 / 4
    assert split.kv_bytes == whole.kv_bytes == 2 * 100 * 4096
    # Two heads on four ranks: each is held by two of them. A latent is held by all.
    assert cost("EP4DP1[atp=4]", context=100, model=model(2)).kv_bytes == 2 * whole.kv_bytes
    assert cost("EP4DP1[atp=4]", context=100, model=model(1, "latent")).kv_bytes == 4 * whole.kv_bytes


def test_attention_of_a_rank_is_what_it_really_holds() -> None:
    """Norms and what is made for all heads do not divide."""
    known = replace(MODEL, attention_shares=((4, 15 << 20),))
    others = MODEL.replicated_bytes - MODEL.attention_bytes
    assert cost("EP4DP1[atp=4]", model=known).shared_bytes == others + (15 << 20)


def test_windows_bound_what_is_read_of_kv() -> None:
    windowed = replace(MODEL, kv_groups=(replace(MODEL.kv_groups[0], kind="window", window=10),))
    assert cost("EP1DP1", context=1000, model=windowed).kv_bytes == 8 * 10 * 4096


def test_links_carry_a_token_once_to_each_place() -> None:
    row = MODEL.hidden_size * 2
    pair = cost("EP2DP1", rows=2)
    # Both experts are elsewhere, or one of them: 2 places * (1 - 1/4) hold one, half of those are not here.
    assert pair.within_seconds == pytest.approx(2 * 4 * 0.75 * row / 1e9)
    assert pair.between_seconds == 0
    wide = cost("EP16DP1", rows=16, domain_size=8)
    assert wide.between_seconds == pytest.approx(2 * 4 * 0.75 * row / 1e8)
    assert cost("EP16DP1", rows=16, domain_size=16).between_seconds == 0
    alone = cost("EP2DP1", rows=2, domain_size=1)
    assert (alone.within_seconds, alone.between_seconds) == (0, pytest.approx(10 * pair.within_seconds))


def test_a_step_is_what_binds_and_its_exchanges() -> None:
    slow = replace(MODEL, flops_per_token=10**12)
    found = cost("EP2DP1", model=slow)
    assert found.seconds == found.flops_seconds + found.exchange_seconds > found.memory_seconds
    assert found.tokens_per_second == 8 / found.seconds
    assert cost("EP1DP2", model=DENSE).seconds == cost("EP1DP2", model=DENSE).memory_seconds


@given(share=st.floats(0, 1), rows=st.floats(0, 1e4))
def test_hits_are_a_share_that_grows_with_rows(share: float, rows: float) -> None:
    assert 0 <= expected_hit(share, rows) <= expected_hit(share, rows + 1) <= 1


@given(ep=st.integers(1, 16), dp=st.integers(1, 4), rows=st.integers(1, 4096), domain=st.integers(1, 16))
def test_costs_are_finite_and_more_rows_cost_no_less(ep: int, dp: int, rows: int, domain: int) -> None:
    topology = make_topology(ep, dp)
    few, more = (cost(topology, rows=count, context=512, domain_size=domain) for count in (rows, rows + 1))
    assert 0 < few.seconds <= more.seconds < float("inf")
    assert (few.exchange_seconds > 0) == (ep > 1)
