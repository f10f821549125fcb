"""`route` against its reference and against what transformers computes (P-LOAD-12)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moewe.moe.routing import RoutingConfig, route
from moewe.moe.routing.reference import route_reference
from tests.support.numerics import ROUTING_WEIGHTS, assert_same, assert_within
from tests.support.pairwise import each_pair


def config(
    num_experts: int, top_k: int, scoring: str = "softmax", renormalize: bool = False, scaling_factor: float = 1.0
) -> RoutingConfig:
    return RoutingConfig(
        num_experts=num_experts,
        top_k=top_k,
        scoring=scoring,
        renormalize=renormalize,
        scaling_factor=scaling_factor,
    )


@each_pair(
    shape=[(8, 2), (16, 12), (4, 4), (1500, 8), (1, 1)],
    num_tokens=[33, 1, 0],
    scoring=["softmax", "sigmoid"],
    renormalize=[False, True],
    biased=[False, True],
)
def test_route_equals_reference(
    num_tokens: int, scoring: str, renormalize: bool, biased: bool, shape: tuple[int, int]
) -> None:
    num_experts, top_k = shape
    torch.manual_seed(0)
    logits = torch.randn(num_tokens, num_experts)
    bias = 0.3 * torch.randn(num_experts) if biased else None
    cfg = config(num_experts, top_k, scoring, renormalize, 2.5)
    got, want = route(logits, cfg, bias), route_reference(logits, cfg, bias)
    assert_same(got.topk_ids, want.topk_ids)
    assert got.topk_weights.dtype == torch.float32
    assert_within(got.topk_weights, want.topk_weights, ROUTING_WEIGHTS * 2.5)


def test_ties_go_to_the_lower_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0, 1.0], [0.0] * 6])
    ids = route(logits, config(6, 4)).topk_ids
    assert ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]
    bias = torch.tensor([0.0, -1.0, 0.0, 0.0, 0.0, 0.0])
    assert route(logits[1:], config(6, 2, "sigmoid"), bias).topk_ids.tolist() == [[0, 2]]


def test_softmax_runs_over_all_experts_before_picking() -> None:
    logits = torch.randn(20, 16, generator=torch.Generator().manual_seed(0))
    weights = route(logits, config(16, 4)).topk_weights
    assert (weights.sum(-1) < 1).all()
    assert_within(weights, logits.softmax(-1).topk(4).values, ROUTING_WEIGHTS)


def test_selection_bias_chooses_but_never_weighs() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    routing = route(logits, config(4, 2, "sigmoid"), torch.tensor([0.0, 0.0, 0.0, 5.0]))
    assert routing.topk_ids.tolist() == [[3, 0]]
    assert_within(routing.topk_weights, torch.tensor([[-1.0, 2.0]]).sigmoid(), ROUTING_WEIGHTS)


def test_sigmoid_scores_that_underflow_do_not_divide_by_zero() -> None:
    weights = route(torch.full((2, 4), -200.0), config(4, 2, "sigmoid", renormalize=True)).topk_weights
    assert weights.isfinite().all()


def test_a_row_does_not_depend_on_the_batch() -> None:
    logits = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    cfg = config(16, 12, "sigmoid", True, 12.0)
    together = route(logits, cfg)
    for row in range(0, 64, 7):
        alone = route(logits[row : row + 1], cfg)
        assert_same(alone.topk_ids[0], together.topk_ids[row])
        assert_within(alone.topk_weights[0], together.topk_weights[row], 12 * ROUTING_WEIGHTS)


def test_bf16_logits_are_scored_in_fp32() -> None:
    logits = torch.randn(5, 8).to(torch.bfloat16)
    assert_same(route(logits, config(8, 2)).topk_weights, route(logits.float(), config(8, 2)).topk_weights)


def test_not_finite_logits_still_give_valid_distinct_ids() -> None:
    logits = torch.randn(4, 8)
    logits[1, 3], logits[2] = torch.nan, torch.nan
    ids = route(logits, config(8, 3)).topk_ids
    assert all(len(set(row)) == 3 and min(row) >= 0 and max(row) < 8 for row in ids.tolist())


@settings(max_examples=50, deadline=None)
@given(data=st.data(), num_experts=st.integers(1, 12))
def test_permuting_experts_permutes_the_choice(data: st.DataObject, num_experts: int) -> None:
    top_k = data.draw(st.integers(1, num_experts))
    values = data.draw(st.permutations(range(num_experts)))
    order = data.draw(st.permutations(range(num_experts)))
    logits = torch.tensor([values], dtype=torch.float32)
    plain = route(logits, config(num_experts, top_k)).topk_ids[0].tolist()
    moved = route(logits[:, list(order)], config(num_experts, top_k)).topk_ids[0].tolist()
    assert [order[e] for e in moved] == plain


@pytest.mark.parametrize(
    ("top_k", "scoring", "word"), [(9, "softmax", "top_k"), (0, "softmax", "top_k"), (2, "x", "x")]
)
def test_a_config_that_cannot_be_is_refused(top_k: int, scoring: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        config(8, top_k, scoring)
