"""The choice of experts on a GPU in one launch: what moe/routing/router.py `route` computes, and slots looked up.

Not the router's matrix product and no rows moved (permute.py). The reference is routing/reference.py `route_reference`.
Letters: T tokens, E experts, K top-k.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...native.gpu import Launch
from ...native.gpu.launch import Constant
from ..routing import Routing, RoutingConfig

_EXPERTS_A_WARP = 512


def triton_route(
    logits: torch.Tensor,
    config: RoutingConfig,
    selection_bias: torch.Tensor | None = None,
    slot_of: torch.Tensor | None = None,
    num_filled: torch.Tensor | None = None,
) -> tuple[Routing, torch.Tensor]:
    """Choose K experts for each row and weigh them, in fp32; ties go to the lower id.

    Args:
        logits: [T, E].
        config: see `RoutingConfig`.
        selection_bias: [E] f32, added to the scores that choose, never to those that weigh.
        slot_of: [E] i32 (or more), the slot of each expert; None: expert e stands in slot e.
        num_filled: [1] i64; rows from there on stand for nothing and get slots -1. None: all do.

    Returns:
        `Routing`, and slots [T, K] i32.
    """
    launch, routing, slot_ids = route_launch(logits, config, selection_bias, slot_of, num_filled)
    launch.run()
    return routing, slot_ids


def route_launch(
    logits: torch.Tensor,
    config: RoutingConfig,
    selection_bias: torch.Tensor | None = None,
    slot_of: torch.Tensor | None = None,
    num_filled: torch.Tensor | None = None,
) -> tuple[Launch, Routing, torch.Tensor]:
    """Return the launch behind `triton_route` and where its results will stand."""
    from .route_triton import route_kernel

    num_tokens, num_experts = logits.shape
    assert num_experts == config.num_experts and logits.is_contiguous(), (logits.shape, logits.stride())
    assert selection_bias is None or config.scoring != "sparsemixer", "sparsemixer knows no selection bias"
    assert selection_bias is None or selection_bias.shape == (num_experts,), selection_bias.shape
    assert slot_of is None or slot_of.dtype == torch.int32, slot_of.dtype
    expert_ids = torch.empty(num_tokens, config.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_tokens, config.top_k, device=logits.device)
    slot_ids = expert_ids if slot_of is None and num_filled is None else torch.empty_like(expert_ids)
    launch = Launch(
        kernel=route_kernel,
        grid=(num_tokens,),
        arguments={
            "logits": logits, "selection_bias": selection_bias, "slot_of": slot_of, "num_filled": num_filled,
            "expert_ids": expert_ids, "weights": weights, "slot_ids": slot_ids, "num_experts": num_experts,
            **routing_numbers(config),
        },
        constants=routing_constants(config),
        num_warps=1 if num_experts <= _EXPERTS_A_WARP else 4,
    )  # fmt: skip
    return launch, Routing(expert_ids, weights), slot_ids


def routing_numbers(config: RoutingConfig) -> dict[str, float]:
    """Return what `routed` of route_triton.py takes while it runs."""
    return {
        "min_weight_sum": config.min_weight_sum, "scaling_factor": config.scaling_factor, "jitter": config.jitter,
    }  # fmt: skip


def routing_constants(config: RoutingConfig) -> dict[str, Constant]:
    """Return what is compiled into `routed` of route_triton.py."""
    tile = routing_tile(config)
    return {
        "SCORING": config.scoring, "RENORMALIZE": config.renormalize, "TOP_K": config.top_k,
        "NUM_GROUPS": _deciding_groups(config), "TOP_GROUPS": min(config.top_groups, _deciding_groups(config)),
        "GROUP_SCORE": config.group_score, "GROUPS": tile.groups, "GROUP_SIZE": tile.group_size,
        "CHOICES": tile.choices,
    }  # fmt: skip


class RoutingTile(NamedTuple):
    """What one token is to a program, in powers of two: scores [groups, group_size], and choices."""

    groups: int
    group_size: int
    choices: int


def routing_tile(config: RoutingConfig) -> RoutingTile:
    """Return how large the tile of a token is."""
    groups = _deciding_groups(config)
    sizes = groups, config.num_experts // groups, config.top_k
    return RoutingTile(*(1 << (size - 1).bit_length() for size in sizes))


def _deciding_groups(config: RoutingConfig) -> int:
    """Return how many groups there are if they decide anything, 1 if not."""
    return config.num_groups if config.top_groups < config.num_groups else 1
