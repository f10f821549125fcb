"""Groups, selection bias, sparsemixer and sums with a floor: `route` against its reference over drawn configs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moewe.moe.routing import RoutingConfig, route
from moewe.moe.routing.reference import route_reference
from tests.support.numerics import ROUTING_WEIGHTS, assert_same, assert_within


def compare(logits: torch.Tensor, config: RoutingConfig, bias: torch.Tensor | None = None) -> None:
    got, want = route(logits, config, bias), route_reference(logits, config, bias)
    assert_same(got.topk_ids, want.topk_ids)
    assert_within(got.topk_weights, want.topk_weights, ROUTING_WEIGHTS * max(1.0, config.scaling_factor))


@st.composite
def configs(draw: st.DrawFn) -> RoutingConfig:
    num_groups, group_size = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    top_groups = draw(st.integers(1, num_groups))
    scorings = ["softmax", "sigmoid"] + ["sparsemixer"] * (top_groups == num_groups)
    return RoutingConfig(
        num_experts=num_groups * group_size,
        top_k=draw(st.integers(1, top_groups * group_size)),
        scoring=draw(st.sampled_from(scorings)),
        renormalize=draw(st.booleans()),
        scaling_factor=draw(st.sampled_from([1.0, 2.5])),
        min_weight_sum=draw(st.sampled_from([0.0, 0.4])),
        num_groups=num_groups,
        top_groups=top_groups,
        group_score=draw(st.sampled_from(["top2", "max"])),
        jitter=draw(st.sampled_from([0.01, 0.26])),
    )


@settings(max_examples=150, deadline=None)
@given(config=configs(), seed=st.integers(0, 1 << 30), biased=st.booleans(), num_tokens=st.integers(0, 9))
def test_random_logits(config: RoutingConfig, seed: int, biased: bool, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(num_tokens, config.num_experts, generator=generator)
    bias = torch.randn(config.num_experts, generator=generator)
    compare(logits, config, bias if biased and config.scoring != "sparsemixer" else None)


@settings(max_examples=150, deadline=None)
@given(config=configs(), data=st.data())
def test_ties_go_to_the_lower_id_and_the_lower_group(config: RoutingConfig, data: st.DataObject) -> None:
    row = st.lists(st.integers(0, 3), min_size=config.num_experts, max_size=config.num_experts)
    compare(torch.tensor([data.draw(row)], dtype=torch.float32), config)


def grouped(group_score: str = "top2", **changes: object) -> RoutingConfig:
    values = dict(num_experts=6, top_k=2, scoring="sigmoid", renormalize=False, num_groups=3, top_groups=1)
    return RoutingConfig(**{**values, "group_score": group_score, **changes})  # type: ignore[arg-type]


def test_a_group_is_as_good_as_its_two_best_or_its_best() -> None:
    logits = torch.tensor([[3.0, -9.0, 1.0, 1.0, 0.0, 0.0]])
    assert route(logits, grouped()).topk_ids.tolist() == [[2, 3]]
    assert route(logits, grouped("max")).topk_ids.tolist() == [[0, 1]]
    assert route(torch.zeros(1, 6), grouped(top_groups=2, top_k=3)).topk_ids.tolist() == [[0, 1, 2]]


def test_experts_of_other_groups_lose_to_negative_scores() -> None:  # P-LOAD-10
    bias = torch.full((6,), -3.0)
    bias[2:4] = -2.0
    assert route(torch.zeros(2, 6), grouped(), bias).topk_ids.tolist() == [[2, 3]] * 2


def test_the_sum_that_renormalises_is_bounded_below() -> None:
    config = RoutingConfig(num_experts=4, top_k=1, scoring="softmax", renormalize=True, min_weight_sum=0.5)
    assert_within(route(torch.zeros(1, 4), config).topk_weights, torch.tensor([[0.5]]), ROUTING_WEIGHTS)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sparsemixer"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_not_finite_logits_still_give_valid_distinct_ids(scoring: str, value: float) -> None:
    groups = 1 if scoring == "sparsemixer" else 4
    config = RoutingConfig(
        num_experts=8, top_k=2, scoring=scoring, renormalize=True, num_groups=groups, top_groups=max(1, groups // 2)
    )
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    logits[1, 3], logits[2] = value, value
    ids = route(logits, config).topk_ids.tolist()
    assert all(len(set(row)) == 2 and min(row) >= 0 and max(row) < 8 for row in ids)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"num_groups": 4}, "num_groups"),
        ({"top_groups": 4}, "top_groups"),
        ({"top_k": 3}, "top_groups"),
        ({"group_score": "mean"}, "group_score"),
        ({"scoring": "sparsemixer"}, "sparsemixer"),
    ],
    ids=str,
)
def test_groups_that_cannot_be_are_refused(changes: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        grouped(**changes)  # type: ignore[arg-type]
