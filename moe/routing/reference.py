"""What `route` must compute, one token at a time in fp64: the specification of the router.

Not fast and not used at run time.
Shapes: as in router.py.
"""

from __future__ import annotations

import math

import torch

from .router import Routing, RoutingConfig


def route_reference(logits: torch.Tensor, config: RoutingConfig, selection_bias: torch.Tensor | None = None) -> Routing:
    """Return what `route` returns, computed with Python floats."""
    all_ids: list[list[int]] = []
    all_weights: list[list[float]] = []
    for row in logits.double().tolist():
        if config.scoring == "softmax":
            top = max(row)
            powers = [math.exp(x - top) for x in row]
            scores = [p / sum(powers) for p in powers]
        else:
            scores = [1.0 / (1.0 + math.exp(-x)) if x > -700 else 0.0 for x in row]
        choice = row
        if selection_bias is not None:
            choice = [s + b for s, b in zip(scores, selection_bias.double().tolist(), strict=True)]
        ids = sorted(range(len(row)), key=lambda e: (-choice[e], e))[: config.top_k]
        weights = [scores[e] for e in ids]
        if config.renormalize:
            total = sum(weights) + 1e-20
            weights = [w / total for w in weights]
        all_ids.append(ids)
        all_weights.append([w * config.scaling_factor for w in weights])
    shape = (len(all_ids), config.top_k)
    return Routing(
        torch.tensor(all_ids, dtype=torch.int32).reshape(shape),
        torch.tensor(all_weights, dtype=torch.float32).reshape(shape),
    )
