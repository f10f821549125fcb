"""From router logits to experts and weights in Triton; route.py launches it.

Not the router's matrix product. Letters: T tokens, E experts, K top-k.
"""

from __future__ import annotations

import triton
import triton.language as tl

_NEVER = tl.constexpr(-(1 << 31))  # below the key of any number
_OTHER_GROUP = tl.constexpr(-(1 << 31) + 1)


@triton.jit
def ordered(values):
    """Return whole numbers that order as fp32 `values` do: NaN above all, -0 like 0."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(values != values, 0x7FFFFFFF, keys)


@triton.jit
def first_of(keys, ids, LAST: tl.constexpr):
    """Return for each token the lowest of `ids` whose key is the largest; LAST is above every id."""
    best = tl.max(tl.max(keys, 2), 1)
    return tl.min(tl.min(tl.where(keys == best[:, None, None], ids, LAST), 2), 1)


@triton.jit
def routed(
    logits, selection_bias, token, num_experts, min_weight_sum, scaling_factor, jitter,
    SCORING: tl.constexpr, RENORMALIZE: tl.constexpr, TOP_K: tl.constexpr, NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, GROUP_SCORE: tl.constexpr, GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    CHOICES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Score, choose among the best groups, weigh, renormalise, scale: ids i32 and weights f32 [TOKENS, CHOICES].

    `token` [TOKENS] are rows of `logits`. Experts are a tile [TOKENS, GROUPS, GROUP_SIZE] (powers of two), a group a
    row; CHOICES is TOP_K or more, a power of two.
    """
    size = num_experts // NUM_GROUPS
    group = tl.arange(0, GROUPS)[None, :]
    place = tl.arange(0, GROUP_SIZE)[None, None, :]
    present = (group < NUM_GROUPS)[:, :, None] & (place < size)
    ids = group[:, :, None] * size + place
    row = tl.load(logits + (token * num_experts)[:, None, None] + ids, mask=present, other=float("-inf")).to(tl.float32)
    if SCORING == "sigmoid":
        scores = tl.sigmoid(row)
    elif SCORING == "softmax":
        powers = tl.exp(row - tl.max(tl.max(row, 2), 1)[:, None, None])
        scores = powers / tl.sum(tl.sum(powers, 2), 1)[:, None, None]
    else:
        scores = row
    choice = row
    worth_of = scores
    if selection_bias is not None:
        choice = scores + tl.load(selection_bias + ids, mask=present, other=0.0)
        worth_of = choice
    keys = tl.where(present, ordered(choice), _NEVER)
    if TOP_GROUPS < NUM_GROUPS:
        in_group = tl.where(present, worth_of, float("-inf"))
        worth = tl.max(in_group, 2)
        if GROUP_SCORE == "top2":
            best_place = tl.min(tl.where(in_group == worth[:, :, None], place, GROUP_SIZE), 2)
            others = tl.where(place == best_place[:, :, None], float("-inf"), in_group)
            worth = worth + tl.where(size > 1, tl.max(others, 2), 0.0)
        group_keys = tl.where(group < NUM_GROUPS, ordered(worth), _NEVER)
        chosen_groups = tl.zeros([TOKENS, GROUPS], tl.int32)
        for _ in range(TOP_GROUPS):
            best = tl.min(tl.where(group_keys == tl.max(group_keys, 1)[:, None], group, GROUPS), 1)[:, None]
            chosen_groups = tl.where(group == best, 1, chosen_groups)
            group_keys = tl.where(group == best, _NEVER, group_keys)
        keys = tl.where((chosen_groups == 1)[:, :, None] | (keys == _NEVER), keys, _OTHER_GROUP)
    k = tl.arange(0, CHOICES)[None, :]
    chosen_ids = tl.zeros([TOKENS, CHOICES], tl.int32)
    chosen_weights = tl.zeros([TOKENS, CHOICES], tl.float32)
    for number in range(TOP_K):
        expert = first_of(keys, ids, GROUPS * GROUP_SIZE)
        is_expert = (ids == expert[:, None, None]) & present
        weight = tl.sum(tl.sum(tl.where(is_expert, scores, 0.0), 2), 1)
        if SCORING == "sparsemixer":
            best = weight[:, None, None]
            close = (best - row <= 2.0 * jitter * tl.maximum(tl.abs(row), best)) & (keys != _NEVER)
            weight = 1.0 / tl.sum(tl.sum(tl.where(close, tl.exp(row - best), 0.0), 2), 1)
        keys = tl.where(is_expert, _NEVER, keys)
        chosen_ids = tl.where(k == number, expert[:, None], chosen_ids)
        chosen_weights = tl.where(k == number, weight[:, None], chosen_weights)
    if RENORMALIZE:
        total = tl.sum(chosen_weights, 1)
        total = tl.where(total < min_weight_sum, min_weight_sum, total)
        # The small number: scores that all underflowed do not divide by zero.
        chosen_weights = chosen_weights / (total + 1e-20)[:, None]
    return chosen_ids, chosen_weights * scaling_factor


@triton.jit
def slots_of(chosen_ids, token, present, slot_of, num_filled):
    """Return the slots of choices [TOKENS, CHOICES], -1 where not `present` and of tokens that stand for nothing."""
    slots = tl.where(present, chosen_ids, -1)
    if slot_of is not None:
        slots = tl.load(slot_of + chosen_ids, mask=present, other=-1)
    if num_filled is not None:
        slots = tl.where((token < tl.load(num_filled))[:, None], slots, -1)
    return slots


@triton.jit
def route_kernel(
    logits, selection_bias, slot_of, num_filled, expert_ids, weights, slot_ids, num_experts, min_weight_sum,
    scaling_factor, jitter,
    SCORING: tl.constexpr, RENORMALIZE: tl.constexpr, TOP_K: tl.constexpr, NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, GROUP_SCORE: tl.constexpr, GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    CHOICES: tl.constexpr,
):  # fmt: skip
    """One token: `routed`, and its slots looked up."""
    token = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    chosen_ids, chosen_weights = routed(
        logits, selection_bias, token, num_experts, min_weight_sum, scaling_factor, jitter, SCORING, RENORMALIZE,
        TOP_K, NUM_GROUPS, TOP_GROUPS, GROUP_SCORE, GROUPS, GROUP_SIZE, CHOICES, 1,
    )  # fmt: skip
    k = tl.arange(0, CHOICES)[None, :]
    here = (token * TOP_K)[:, None] + k
    present = k < TOP_K
    tl.store(expert_ids + here, chosen_ids, mask=present)
    tl.store(weights + here, chosen_weights, mask=present)
    if slot_of is not None or num_filled is not None:
        tl.store(slot_ids + here, slots_of(chosen_ids, token, present, slot_of, num_filled), mask=present)
