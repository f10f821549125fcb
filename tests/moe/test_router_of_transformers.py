"""`route` against the routers of transformers on 256 random tokens, and its precision (P-LOAD-10 to -12, P-EP-06)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import DeepseekV2Config, DeepseekV3Config, Ernie4_5_MoeConfig, GptOssConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from moewe.moe.routing import RoutingConfig, route
from tests.support.numerics import ROUTING_WEIGHTS, assert_same, assert_within

NUM_TOKENS, WIDTH, NUM_EXPERTS, TOP_K = 256, 32, 16, 4


def hidden_and_weight(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(NUM_EXPERTS, WIDTH, generator=generator) * WIDTH**-0.5
    return torch.randn(NUM_TOKENS, WIDTH, generator=generator), weight


def compare(
    logits: torch.Tensor, config: RoutingConfig, weights: torch.Tensor, ids: torch.Tensor, bias: Any = None
) -> None:
    """Assert that `route` gives what transformers gave, whatever the order of the K."""
    got = route(logits, config, bias)
    ours, theirs = got.topk_ids.argsort(-1), ids.argsort(-1)
    assert_same(got.topk_ids.gather(-1, ours).long(), ids.gather(-1, theirs))
    bound = ROUTING_WEIGHTS * max(1.0, config.scaling_factor)
    assert_within(got.topk_weights.gather(-1, ours), weights.gather(-1, theirs).float(), bound)


def deepseek_v3(bias: torch.Tensor, *, norm: bool, factor: float) -> None:
    x, weight = hidden_and_weight()
    router = DeepseekV3TopkRouter(
        DeepseekV3Config(
            hidden_size=WIDTH, n_routed_experts=NUM_EXPERTS, num_experts_per_tok=TOP_K, n_group=4, topk_group=2,
            norm_topk_prob=norm, routed_scaling_factor=factor,
        )
    )  # fmt: skip
    router.weight.copy_(weight)
    router.e_score_correction_bias.copy_(bias)
    logits, weights, ids = router(x)
    config = RoutingConfig(
        num_experts=NUM_EXPERTS, top_k=TOP_K, scoring="sigmoid", renormalize=norm, scaling_factor=factor,
        num_groups=4, top_groups=2,
    )  # fmt: skip
    compare(logits, config, weights, ids, bias)


@torch.no_grad()
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_deepseek_v3(norm: bool, factor: float) -> None:  # P-LOAD-11
    bias = 0.2 * torch.randn(NUM_EXPERTS, generator=torch.Generator().manual_seed(1))
    deepseek_v3(bias, norm=norm, factor=factor)


@torch.no_grad()
@pytest.mark.parametrize("elsewhere", [0.0, -2.0])
def test_deepseek_v3_with_a_bias_made_by_hand(elsewhere: float) -> None:  # P-LOAD-10
    """+5 on expert 0, -5 on all of group 1; with -2 elsewhere all other scores are negative."""
    bias = torch.full((NUM_EXPERTS,), elsewhere)
    bias[0], bias[4:8] = 5.0, -5.0
    deepseek_v3(bias, norm=True, factor=2.5)


@torch.no_grad()
def test_deepseek_v2_groups_by_their_best() -> None:
    x, weight = hidden_and_weight()
    router = DeepseekV2TopkRouter(
        DeepseekV2Config(
            hidden_size=WIDTH, n_routed_experts=NUM_EXPERTS, num_experts_per_tok=TOP_K, n_group=4, topk_group=2,
            topk_method="group_limited_greedy", routed_scaling_factor=16.0,
        )
    )  # fmt: skip
    router.weight.copy_(weight)
    logits, weights, ids = router(x)
    config = RoutingConfig(
        num_experts=NUM_EXPERTS, top_k=TOP_K, scoring="softmax", renormalize=False, scaling_factor=16.0,
        num_groups=4, top_groups=2, group_score="max",
    )  # fmt: skip
    compare(logits, config, weights, ids)
    assert (route(logits, config).topk_weights.sum(-1) < 16).all()  # P-LOAD-12: softmax ran over all experts


@torch.no_grad()
@pytest.mark.parametrize("floor", [1e-12, 0.5])
def test_ernie_bounds_the_sum_below(floor: float) -> None:
    x, weight = hidden_and_weight()
    router = Ernie4_5_MoeTopKRouter(
        Ernie4_5_MoeConfig(hidden_size=WIDTH, moe_num_experts=NUM_EXPERTS, moe_k=TOP_K, moe_norm_min=floor)
    )
    router.weight.copy_(weight)
    bias = 0.05 * torch.randn(NUM_EXPERTS, generator=torch.Generator().manual_seed(1))
    router.moe_statics.e_score_correction_bias.copy_(bias[None])
    logits, weights, ids = router(x)
    config = RoutingConfig(
        num_experts=NUM_EXPERTS, top_k=TOP_K, scoring="softmax", renormalize=True, min_weight_sum=floor
    )
    compare(logits, config, weights, ids, bias)


@torch.no_grad()
def test_gpt_oss_softmax_over_the_chosen() -> None:
    x, weight = hidden_and_weight()
    router = GptOssTopKRouter(GptOssConfig(hidden_size=WIDTH, num_local_experts=NUM_EXPERTS, num_experts_per_tok=TOP_K))
    router.weight.copy_(weight)
    router.bias.copy_(torch.randn(NUM_EXPERTS, generator=torch.Generator().manual_seed(1)))
    logits, weights, ids = router(x)
    config = RoutingConfig(num_experts=NUM_EXPERTS, top_k=TOP_K, scoring="softmax", renormalize=True)
    compare(logits, config, weights, ids)


@torch.no_grad()
@pytest.mark.parametrize("jitter", [0.0, 0.01, 0.3])
@pytest.mark.parametrize("shift", [0.0, -4.0, 4.0])
def test_phimoe_sparsemixer(jitter: float, shift: float) -> None:
    x, weight = hidden_and_weight()
    logits = x @ weight.T + shift
    weights, ids = sparsemixer(logits, jitter_eps=jitter, training=False)
    config = RoutingConfig(num_experts=NUM_EXPERTS, top_k=2, scoring="sparsemixer", renormalize=False, jitter=jitter)
    compare(logits, config, weights, ids)


def test_chosen_sets_survive_near_ties() -> None:  # P-EP-06
    """Pairs of router rows that differ by 1e-3, bf16 inputs: as fp64 chooses, alone and in a batch."""
    generator = torch.Generator().manual_seed(0)
    num_experts, width, top_k = 32, 256, 4
    weight = torch.randn(num_experts, width, generator=generator) * width**-0.5
    weight[1::2] = weight[::2] + 1e-3 * torch.randn(num_experts // 2, width, generator=generator)
    weight, x = weight.bfloat16(), torch.randn(4096, width, generator=generator).bfloat16()
    config = RoutingConfig(
        num_experts=num_experts, top_k=top_k, scoring="sigmoid", renormalize=True, num_groups=8, top_groups=4
    )
    bias = 0.1 * torch.randn(num_experts // 2, generator=generator).repeat_interleave(2)  # sets no pair apart

    def chosen(rows: torch.Tensor) -> torch.Tensor:
        return route(F.linear(rows.float(), weight.float()), config, bias).topk_ids.sort(-1).values

    scores = (x.double() @ weight.double().T).sigmoid() + bias.double()
    worth = scores.unflatten(-1, (8, 4)).topk(2, -1).values.sum(-1)
    outside = torch.ones_like(worth, dtype=torch.bool).scatter_(1, worth.topk(4, -1).indices, False)
    expected = scores.masked_fill(outside.repeat_interleave(4, -1), -torch.inf).topk(top_k, -1).indices.sort(-1).values
    together = torch.cat([chosen(rows) for rows in x.split(64)])
    assert (together == expected).all(-1).double().mean() >= 0.999
    assert_same(torch.cat([chosen(rows) for rows in x[:512].split(1)]), together[:512])
