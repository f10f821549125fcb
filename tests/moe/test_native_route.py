"""The native router against the reference, and its rows against `sort_pairs`; the same bits in any batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moewe.moe.native_route import NativeRouter
from moewe.moe.routing import SCORINGS, RoutingConfig
from moewe.moe.routing.reference import route_reference
from moewe.moe.wide_ep.exchanges.pairs import sort_pairs
from tests.moe.test_router_groups import configs
from tests.support.native import needs_native, team_of
from tests.support.numerics import ROUTING_WEIGHTS, assert_same, assert_within

pytestmark = needs_native


def draw_case(config: RoutingConfig, num_tokens: int, width: int, biased: bool) -> tuple[torch.Tensor, dict]:
    made = torch.Generator().manual_seed(num_tokens * 1000 + width)
    x = torch.randn(num_tokens, width, generator=made).bfloat16()
    weights = {"router": torch.randn(config.num_experts, width, generator=made) / width**0.5}
    if biased:
        weights["bias"] = torch.randn(config.num_experts, generator=made)
        if config.scoring != "sparsemixer":
            weights["selection_bias"] = 0.3 * torch.randn(config.num_experts, generator=made)
    return x, weights


@settings(max_examples=150, deadline=None)
@given(
    config=configs(),
    num_tokens=st.sampled_from([0, 1, 2, 3, 9, 40]),
    width=st.sampled_from([1, 3, 32, 65]),
    biased=st.booleans(),
    data=st.data(),
)
def test_route_equals_reference(
    config: RoutingConfig, num_tokens: int, width: int, biased: bool, data: st.DataObject
) -> None:
    x, weights = draw_case(config, num_tokens, width, biased)
    slots = data.draw(st.permutations(range(-1, config.num_experts)))[: config.num_experts]
    slot_of = torch.tensor(slots, dtype=torch.int32)
    router = NativeRouter(config, **weights, num_slots=config.num_experts, slot_of=slot_of)
    got = router(x)
    logits = x.double() @ weights["router"].double().T
    logits += weights.get("bias", torch.zeros(())).double()
    want = route_reference(logits, config, weights.get("selection_bias"))
    assert_same(got.expert_ids, want.topk_ids)
    assert_within(got.weights, want.topk_weights, ROUTING_WEIGHTS * 4 * max(1.0, config.scaling_factor))
    assert_same(got.slot_ids, slot_of[got.expert_ids.long()])
    pairs = sort_pairs(got.slot_ids, torch.arange(config.num_experts + 1, dtype=torch.int32))
    assert got.offsets.tolist() == pairs.offsets
    assert_same(got.tokens_per_slot, pairs.counts)
    assert_same(got.row_tokens[: len(pairs.tokens)].long(), pairs.tokens)
    dropped = got.slot_ids < 0
    assert_same(got.rows < 0, dropped)
    assert_same(got.rows[~dropped].long(), pairs.positions.t()[~dropped])


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("num_experts", [5, 16, 40, 130])
def test_a_token_is_routed_the_same_in_any_batch(num_experts: int, scoring: str) -> None:
    config = RoutingConfig(num_experts=num_experts, top_k=3, scoring=scoring, renormalize=True)
    x, weights = draw_case(config, 37, 259, biased=True)
    router = NativeRouter(config, **weights, num_slots=num_experts)
    whole = router(x)
    for threads in (1, 2, 3):
        with team_of(threads):
            for start, stop in [(0, 1), (1, 2), (0, 37), (7, 24), (36, 37)]:
                part = router(x[start:stop].contiguous())
                assert_same(part.expert_ids, whole.expert_ids[start:stop])
                assert_same(part.weights, whole.weights[start:stop])


def test_ties_go_to_the_lower_id_and_ids_are_distinct_even_of_nan() -> None:
    config = RoutingConfig(num_experts=6, top_k=4, scoring="softmax", renormalize=False)
    router = NativeRouter(config, torch.tensor([[1.0], [3], [3], [1], [3], [1]]), num_slots=6)
    assert router(torch.ones(1, 1, dtype=torch.bfloat16)).expert_ids.tolist() == [[1, 2, 4, 0]]
    ill = router(torch.full((1, 1), torch.nan, dtype=torch.bfloat16))
    assert len(set(ill.expert_ids[0].tolist())) == 4 and ill.weights.isnan().all()
