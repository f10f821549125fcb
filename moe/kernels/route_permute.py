"""Choice of experts, sorting by slot and cutting into tiles in one launch, where tokens are few: a decode step's.

What route.py, permute.py and row_tiles.py do one after the other, to the same bits but for the order in which a softmax
adds up. A launch takes microseconds whatever it does, and a decode step has hundreds.
Letters: T tokens, E experts, K top-k, S slots, M rows (choices that are not dropped).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...native.gpu import Launch
from ..routing import Routing, RoutingConfig
from .permute import Permuted, empty_permuted
from .route import routing_constants, routing_numbers, routing_tile
from .row_tiles import RowTiles, padded_slots

_MOST_CHOICES = 128  # of the one program, which compares each with each
_MOST_SCORES = 4096  # that it holds in registers
_SCORES_A_WARP, _LEAST_WARPS, _MOST_WARPS = 256, 4, 16


class RoutedRows(NamedTuple):
    """Experts, weights and the order of rows: see `Routing`, `Permuted`."""

    routing: Routing
    permuted: Permuted


def fits_one_program(num_tokens: int, config: RoutingConfig) -> bool:
    """Return whether one program can route `num_tokens` tokens."""
    return 0 < num_tokens <= _tokens_held(num_tokens, config)


def route_permute_launch(
    logits: torch.Tensor,
    config: RoutingConfig,
    selection_bias: torch.Tensor | None,
    slot_of: torch.Tensor,
    *,
    counts: torch.Tensor,
    cut: RowTiles,
    num_filled: torch.Tensor | None = None,
) -> tuple[Launch, RoutedRows]:
    """Return the launch, and where its results will stand.

    Args:
        logits: [T, E], as many as `fits_one_program` allows.
        config, selection_bias, num_filled: as of `triton_route`.
        slot_of: [E] i32 (or more), the slot of each expert, -1 for one without.
        counts: [S] i64, filled with the rows of each slot.
        cut: filled with the tiles of rows, see `empty_tiles`.
    """
    from .route_permute_triton import route_permute_kernel

    num_tokens, num_experts = logits.shape
    assert fits_one_program(num_tokens, config) and num_experts == config.num_experts, (logits.shape, config)
    assert logits.is_contiguous() and slot_of.dtype == torch.int32, (logits.stride(), slot_of.dtype)
    assert selection_bias is None or selection_bias.shape == (num_experts,), selection_bias.shape
    assert counts.dtype == torch.int64 and counts.is_contiguous(), counts.dtype
    expert_ids = torch.empty(num_tokens, config.top_k, dtype=torch.int32, device=logits.device)
    routing = Routing(expert_ids, torch.empty(num_tokens, config.top_k, device=logits.device))
    permuted = empty_permuted(expert_ids, counts)
    tokens, tile = _tokens_held(num_tokens, config), routing_tile(config)
    warps = tokens * tile.groups * tile.group_size // _SCORES_A_WARP
    launch = Launch(
        kernel=route_permute_kernel,
        grid=(1,),
        arguments={
            "logits": logits, "selection_bias": selection_bias, "slot_of": slot_of, "num_filled": num_filled,
            "expert_ids": expert_ids, "weights": routing.topk_weights, "row_tokens": permuted.row_tokens,
            "rows": permuted.rows, "tokens_per_slot": counts, "tiles": cut.tiles, "num_tiles": cut.num_tiles,
            "num_tokens": num_tokens, "num_experts": num_experts, "num_slots": len(counts),
            "max_tiles": cut.max_tiles, "block_m": cut.block_m, **routing_numbers(config),
        },
        constants={**routing_constants(config), "TOKENS": tokens, "SLOTS": padded_slots(len(counts))},
        num_warps=min(max(warps, _LEAST_WARPS), _MOST_WARPS),
    )  # fmt: skip
    return launch, RoutedRows(routing, permuted)


def _tokens_held(num_tokens: int, config: RoutingConfig) -> int:
    """Return how many tokens the program holds: one, or as many as it can, so that there are two forms to compile."""
    tile = routing_tile(config)
    most = min(_MOST_CHOICES // tile.choices, _MOST_SCORES // (tile.groups * tile.group_size))
    return min(1, most) if num_tokens == 1 else most
