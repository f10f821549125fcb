"""Choice of experts, sorting and tiles of few tokens by one program, in Triton; route_permute.py launches it.

Letters: T tokens, E experts, K top-k, S slots, M rows (choices that are not dropped).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .permute_triton import place_of
from .route_triton import routed, slots_of
from .row_tiles_triton import store_tiles


@triton.jit(do_not_specialize=["num_tokens", "num_slots", "max_tiles", "block_m"])
def route_permute_kernel(
    logits, selection_bias, slot_of, num_filled, expert_ids, weights, row_tokens, rows, tokens_per_slot, tiles,
    num_tiles, num_tokens, num_experts, num_slots, max_tiles, block_m, min_weight_sum, scaling_factor, jitter,
    SCORING: tl.constexpr, RENORMALIZE: tl.constexpr, TOP_K: tl.constexpr, NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, GROUP_SCORE: tl.constexpr, GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    CHOICES: tl.constexpr, TOKENS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """All tokens: what `route_kernel`, `place_kernel` and `tiles_kernel` do one after the other.

    A choice is number token * CHOICES + k, so that choices of one slot keep their order.
    """
    token = tl.arange(0, TOKENS)
    chosen_ids, chosen_weights = routed(
        logits, selection_bias, tl.minimum(token, num_tokens - 1), num_experts, min_weight_sum, scaling_factor, jitter,
        SCORING, RENORMALIZE, TOP_K, NUM_GROUPS, TOP_GROUPS, GROUP_SCORE, GROUPS, GROUP_SIZE, CHOICES, TOKENS,
    )  # fmt: skip
    k = tl.arange(0, CHOICES)
    present = (token < num_tokens)[:, None] & (k < TOP_K)[None, :]
    here = token[:, None] * TOP_K + k[None, :]
    tl.store(expert_ids + here, chosen_ids, mask=present)
    tl.store(weights + here, chosen_weights, mask=present)
    slots = tl.reshape(slots_of(chosen_ids, token, present, slot_of, num_filled), [TOKENS * CHOICES])
    counts = tl.histogram(tl.where(slots < 0, 0, slots), SLOTS, mask=slots >= 0)
    slot = tl.arange(0, SLOTS)
    tl.store(tokens_per_slot + slot, counts.to(tl.int64), mask=slot < num_slots)
    choice = tl.arange(0, TOKENS * CHOICES)
    row = place_of(slots, choice, tl.cumsum(counts, 0) - counts)
    own_token = choice // CHOICES
    own_k = choice % CHOICES
    is_choice = (own_token < num_tokens) & (own_k < TOP_K)
    tl.store(rows + own_token * TOP_K + own_k, tl.where(slots < 0, -1, row), mask=is_choice)
    tl.store(row_tokens + row, own_token, mask=slots >= 0)
    store_tiles(counts, tiles, num_tiles, 0, 1, max_tiles, block_m, SLOTS)
