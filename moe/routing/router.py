"""From router logits to the experts of each token and their weights.

Not the router's matrix product (moe/layer.py) and not a placement: ids are logical experts, ranks are unknown here.
Shapes: logits [T, E] f32 -> topk_ids [T, K] i32, topk_weights [T, K] f32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

SCORINGS = ("softmax", "sigmoid", "sparsemixer")
GROUP_SCORES = ("top2", "max")
# Keeps the sum of sigmoid scores that all underflowed from dividing by zero; too small to change any other sum.
_SUM_FLOOR = 1e-20


@dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    """How logits become experts and weights.

    Attributes:
        num_experts: E.
        top_k: K, experts a token.
        scoring: `softmax` over all E logits (before picking, not after), `sigmoid` of each, or `sparsemixer` (Liu et
            al., 2023; K = 2: each choice is weighed by a softmax over the logits close enough to it).
        renormalize: divide the K weights of a token by their sum. Softmax over only the K chosen logits is the same
            as `softmax` with this.
        min_weight_sum: the sum that `renormalize` divides by is at least this.
        scaling_factor: multiplies the weights in the end, exactly once, whatever `renormalize` says.
        num_groups, top_groups: experts stand in `num_groups` equal runs; a token chooses only among its `top_groups`
            best. 1 and 1 know no groups.
        group_score: what makes a group good: the sum of its two best (`top2`) or its best (`max`), bias included.
        jitter: of `sparsemixer`: logits further than 2 * jitter below the best, relative to max(|logit|, best), do
            not take part.
    """

    num_experts: int
    top_k: int
    scoring: str
    renormalize: bool
    scaling_factor: float = 1.0
    min_weight_sum: float = 0.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "top2"
    jitter: float = 0.01

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k must be in [1, num_experts={self.num_experts}], got {self.top_k}")
        if self.scoring not in SCORINGS:
            raise ValueError(f"scoring must be one of {', '.join(SCORINGS)}, got {self.scoring!r}")
        if self.group_score not in GROUP_SCORES:
            raise ValueError(f"group_score must be one of {', '.join(GROUP_SCORES)}, got {self.group_score!r}")
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise ValueError(f"num_groups must divide num_experts={self.num_experts}, got {self.num_groups}")
        if not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(f"top_groups must be in [1, num_groups={self.num_groups}], got {self.top_groups}")
        allowed = self.top_groups * self.group_size
        if self.top_k > allowed:
            raise ValueError(f"top_k must be at most the {allowed} experts of top_groups groups, got {self.top_k}")
        if self.scoring == "sparsemixer" and self.top_groups < self.num_groups:
            raise ValueError(f"scoring 'sparsemixer' knows no groups, got num_groups={self.num_groups}")

    @property
    def group_size(self) -> int:
        """Experts of a group."""
        return self.num_experts // self.num_groups


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
