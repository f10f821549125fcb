"""From router logits to the experts of each token and their weights.

Not the router's matrix product (moe/layer.py) and not a placement: ids are logical experts, ranks are unknown here.
Shapes: logits [T, E] f32 -> topk_ids [T, K] i32, topk_weights [T, K] f32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .config import RoutingConfig

# Keeps the sum of sigmoid scores that all underflowed from dividing by zero; too small to change any other sum.
_SUM_FLOOR = 1e-20


class Routing(NamedTuple):
    """The experts of each token, best first.

    Attributes:
        topk_ids: [T, K] i32 logical experts; no id twice in a row.
        topk_weights: [T, K] f32.
    """

    topk_ids: torch.Tensor
    topk_weights: torch.Tensor


def route(logits: torch.Tensor, config: RoutingConfig, selection_bias: torch.Tensor | None = None) -> Routing:
    """Choose K experts for each row and weigh them, in fp32; ties go to the lower id.

    Args:
        logits: [T, E]; anything but f32 is converted first.
        config: see `RoutingConfig`.
        selection_bias: [E] f32, added to the scores that choose, never to those that weigh.

    Returns:
        `Routing`, rows ordered from the best choice down.

    Example:
        Logits [0, 2, 2] with K = 2 choose experts [1, 2]; without renormalisation softmax weighs both with 0.468.
    """
    logits = logits.float()
    if config.scoring == "sparsemixer":
        assert selection_bias is None, "sparsemixer knows no selection bias"
        ids = _best(logits, config.top_k)
        weights = _sparsemixer_weights(logits, ids, config.jitter)
    else:
        scores = logits.softmax(-1) if config.scoring == "softmax" else logits.sigmoid()  # [T, E]
        # Without a bias the logits choose: the order is that of the scores, but survives where scores round to equal.
        choice = logits if selection_bias is None else scores + selection_bias
        if config.top_groups < config.num_groups:
            choice = _mask_groups(choice, scores if selection_bias is None else choice, config)
        ids = _best(choice, config.top_k)  # [T, K] i64
        weights = scores.gather(1, ids)  # [T, K]
    if config.renormalize:
        total = weights.sum(-1, keepdim=True)
        if config.min_weight_sum:
            total = total.clamp(min=config.min_weight_sum)
        weights = weights / (total + _SUM_FLOOR)
    if config.scaling_factor != 1.0:
        weights = weights * config.scaling_factor
    return Routing(ids.to(torch.int32), weights)


def _best(values: torch.Tensor, num: int) -> torch.Tensor:
    """Return where the `num` largest of each row stand, best first, ties to the lower number; never one twice."""
    return values.sort(dim=-1, descending=True, stable=True)[1][:, :num]


def _mask_groups(choice: torch.Tensor, scores: torch.Tensor, config: RoutingConfig) -> torch.Tensor:
    """Set `choice` [T, E] to -inf outside of the best groups by `scores` [T, E] (zero could beat negative scores)."""
    grouped = scores.reshape(-1, config.num_groups, config.group_size)  # [T, G, E / G]
    if config.group_score == "max":
        worth = grouped.amax(-1)  # [T, G]
    else:
        worth = grouped.topk(min(2, config.group_size), dim=-1).values.sum(-1)
    masked = torch.ones_like(worth, dtype=torch.bool).scatter_(1, _best(worth, config.top_groups), False)
    return choice.masked_fill(masked.repeat_interleave(config.group_size, dim=-1), -torch.inf)


def _sparsemixer_weights(logits: torch.Tensor, ids: torch.Tensor, jitter: float) -> torch.Tensor:
    """Weigh each choice by a softmax over experts that are not chosen before it and close enough to it: [T, K]."""
    weights, left = [], logits
    for choice in torch.split_with_sizes(ids, [1] * ids.shape[1], dim=-1):  # [T, 1]
        best = logits.gather(1, choice)
        far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * jitter
        weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(1, choice))
        left = left.scatter(1, choice, -torch.inf)
    return torch.cat(weights, dim=-1)
