"""`triton_route` against its reference, P-EP-06 among it."""

from __future__ import annotations

import pytest
import torch

from moewe.moe.kernels.route import triton_route
from moewe.moe.routing import RoutingConfig
from moewe.moe.routing.reference import route_reference
from tests.support.numerics import ROUTING_WEIGHTS, assert_same, assert_within

BASE = {"num_experts": 16, "top_k": 4, "scoring": "softmax", "renormalize": False}
CONFIGS = {
    "softmax": {},
    "softmax_renormalised": {"renormalize": True},
    "softmax_groups": {"num_groups": 4, "top_groups": 2, "group_score": "max"},
    "sigmoid": {"scoring": "sigmoid", "renormalize": True, "scaling_factor": 2.5},
    "sigmoid_groups": {"scoring": "sigmoid", "renormalize": True, "num_groups": 4, "top_groups": 2},
    "groups_of_three": {"num_experts": 18, "scoring": "sigmoid", "num_groups": 6, "top_groups": 3},
    "groups_of_one": {"num_experts": 6, "num_groups": 6, "top_groups": 4},
    "sparsemixer": {"top_k": 2, "scoring": "sparsemixer", "jitter": 0.2},
    "every_expert": {"num_experts": 12, "top_k": 12},
    "one_expert": {"num_experts": 1, "top_k": 1},
    "odd_number": {"num_experts": 13, "top_k": 3, "min_weight_sum": 0.9, "renormalize": True},
    "many": {"num_experts": 1500, "top_k": 8},
}


def config(name: str) -> RoutingConfig:
    return RoutingConfig(**{**BASE, **CONFIGS[name]})


QUICK = [("softmax_renormalised", False), ("sigmoid_groups", True), ("groups_of_three", False), ("sparsemixer", False)]
ALL = [(name, biased) for name in CONFIGS for biased in (False, True) if (name, biased) != ("sparsemixer", True)]


@pytest.mark.parametrize(
    ("name", "biased"), [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in ALL]
)
def test_route_equals_its_reference(name: str, biased: bool) -> None:
    cfg = config(name)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, cfg.num_experts, generator=generator)
    bias = 0.3 * torch.randn(cfg.num_experts, generator=generator) if biased else None
    slot_of = torch.randperm(cfg.num_experts, generator=generator).to(torch.int32)
    (ids, weights), slots = triton_route(logits, cfg, bias, slot_of)
    want = route_reference(logits, cfg, bias)
    assert_same(ids, want.topk_ids)
    assert_within(weights, want.topk_weights, ROUTING_WEIGHTS * cfg.scaling_factor)
    assert_same(slots, slot_of[ids.long()])


def test_ties_go_to_the_lower_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0, 1.0], [0.0, -0.0, 0.0, -0.0, 0.0, -0.0]])
    cfg = RoutingConfig(num_experts=6, top_k=4, scoring="softmax", renormalize=False)
    assert triton_route(logits, cfg)[0].topk_ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]
    grouped = RoutingConfig(num_experts=6, top_k=2, scoring="sigmoid", renormalize=False, num_groups=3, top_groups=1)
    assert triton_route(logits[1:], grouped)[0].topk_ids.tolist() == [[0, 1]]


def test_order_survives_where_scores_round_to_equal() -> None:
    logits = torch.tensor([[40.0, 60.0, 50.0]])
    cfg = RoutingConfig(num_experts=3, top_k=2, scoring="sigmoid", renormalize=True)
    assert triton_route(logits, cfg)[0].topk_ids.tolist() == [[1, 2]]


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_scores_that_underflow_do_not_divide_by_zero() -> None:
    cfg = RoutingConfig(num_experts=4, top_k=2, scoring="sigmoid", renormalize=True)
    assert triton_route(torch.full((1, 4), -200.0), cfg)[0].topk_weights.isfinite().all()


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("name", ["softmax", "sigmoid_groups"])
def test_not_finite_logits_still_give_valid_distinct_ids(name: str) -> None:
    logits = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    logits[1, 3], logits[2], logits[3, ::2] = torch.nan, torch.nan, -torch.inf
    ids = triton_route(logits, config(name))[0].topk_ids
    assert all(len(set(row)) == 4 and min(row) >= 0 and max(row) < 16 for row in ids.tolist())


def test_near_ties_are_decided_in_fp32() -> None:  # P-EP-06
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 8, generator=generator).repeat_interleave(2, 1)
    logits[:, 1::2] += 1e-6
    cfg = RoutingConfig(num_experts=16, top_k=4, scoring="softmax", renormalize=True)
    assert_same(triton_route(logits, cfg)[0].topk_ids, route_reference(logits, cfg).topk_ids)
    together = triton_route(logits, cfg)[0]
    assert_same(triton_route(logits[2:3], cfg)[0].topk_weights[0], together.topk_weights[2])
