"""What `route` must compute, one token at a time in fp64: the specification of the router.

Not fast and not used at run time.
Shapes: as in router.py.
"""

from __future__ import annotations

import math

import torch

from .config import RoutingConfig
from .router import Routing


def route_reference(logits: torch.Tensor, config: RoutingConfig, selection_bias: torch.Tensor | None = None) -> Routing:
    """Return what `route` returns, computed with Python floats."""
    bias = [0.0] * config.num_experts if selection_bias is None else selection_bias.double().tolist()
    all_ids: list[list[int]] = []
    all_weights: list[list[float]] = []
    for row in logits.double().tolist():
        if config.scoring == "sparsemixer":
            ids, weights = _sparsemixer(row, config)
        else:
            scores = _softmax(row) if config.scoring == "softmax" else [_sigmoid(x) for x in row]
            biased = [s + b for s, b in zip(scores, bias, strict=True)]
            allowed = _allowed_experts(biased, config)
            choice = row if selection_bias is None else biased
            ids = sorted(allowed, key=lambda e: (-choice[e], e))[: config.top_k]
            weights = [scores[e] for e in ids]
        if config.renormalize:
            total = max(sum(weights), config.min_weight_sum) + 1e-20
            weights = [w / total for w in weights]
        all_ids.append(ids)
        all_weights.append([w * config.scaling_factor for w in weights])
    shape = (len(all_ids), config.top_k)
    return Routing(
        torch.tensor(all_ids, dtype=torch.int32).reshape(shape),
        torch.tensor(all_weights, dtype=torch.float32).reshape(shape),
    )


def _softmax(row: list[float]) -> list[float]:
    largest = max(row)
    powers = [math.exp(x - largest) for x in row]
    total = sum(powers)
    return [power / total for power in powers]


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x > -700 else 0.0


def _allowed_experts(biased: list[float], config: RoutingConfig) -> list[int]:
    """Return the experts of the best groups."""
    size = config.num_experts // config.num_groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(config.num_groups)]
    num_counted = 2 if config.group_score == "top2" else 1
    worth = [sum(sorted((biased[e] for e in group), reverse=True)[:num_counted]) for group in groups]
    best = sorted(range(config.num_groups), key=lambda g: (-worth[g], g))[: config.top_groups]
    return [e for g in best for e in groups[g]]


def _sparsemixer(row: list[float], config: RoutingConfig) -> tuple[list[int], list[float]]:
    ids: list[int] = []
    weights: list[float] = []
    for _ in range(config.top_k):
        left = [e for e in range(len(row)) if e not in ids]
        chosen = min(left, key=lambda e: (-row[e], e))
        best = row[chosen]
        # Relative to max(|x|, best); where that is zero, x is as good as the best.
        close = [e for e in left if best - row[e] <= 2 * config.jitter * max(abs(row[e]), best)]
        ids.append(chosen)
        weights.append(1.0 / sum(math.exp(row[e] - best) for e in close))
    return ids, weights
