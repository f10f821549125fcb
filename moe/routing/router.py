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
    scores = logits.softmax(-1) if config.scoring == "softmax" else logits.sigmoid()  # [T, E]
    # Without a bias the logits choose: the order is that of the scores, but it survives where scores round to equal.
    choice = logits if selection_bias is None else scores + selection_bias
    ids = choice.sort(dim=-1, descending=True, stable=True)[1][:, : config.top_k]  # [T, K] i64
    weights = scores.gather(1, ids)  # [T, K]
    if config.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _SUM_FLOOR)
    if config.scaling_factor != 1.0:
        weights = weights * config.scaling_factor
    return Routing(ids.to(torch.int32), weights)
