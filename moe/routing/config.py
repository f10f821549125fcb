"""How a model chooses experts: what a config says of its router.

Not the choice (router.py). No torch: whoever plans reads this.
"""

from __future__ import annotations

from dataclasses import dataclass

SCORINGS = ("softmax", "sigmoid", "sparsemixer")
GROUP_SCORES = ("top2", "max")


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
