"""Rows of logits in Triton: the best place, finite numbers, log-probabilities, and tokens by chance without a sort.

rows.py launches it; logits are never edited here. A program takes a row, so that a row gives the same in every batch.
Letters: N rows, V vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl

NOWHERE = tl.constexpr(0x7FFFFFFF)
ONE_BITS = tl.constexpr(0x3F800000)  # of 1.0, the largest weight


@triton.jit
def scan_kernel(values, best, finite, width, BLOCK: tl.constexpr):
    """Say where the largest number of a row stands, the first of equal ones, and whether all are finite."""
    row = tl.program_id(0).to(tl.int64)
    largest, place, bad = tl.full([], float("-inf"), tl.float32), tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for at in tl.range(0, width, BLOCK):
        columns = at + tl.arange(0, BLOCK)
        inside = columns < width
        numbers = tl.load(values + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        bad += tl.sum((inside & ~(tl.abs(numbers) < float("inf"))).to(tl.int32), axis=0)
        numbers = tl.where(inside & (numbers == numbers), numbers, float("-inf"))
        top = tl.max(numbers, axis=0)
        first = tl.min(tl.where(numbers == top, columns, NOWHERE), axis=0)
        place = tl.where(top > largest, first, place)
        largest = tl.maximum(largest, top)
    tl.store(best + row, place.to(tl.int64))
    tl.store(finite + row, (bad == 0).to(tl.int8))


@triton.jit(do_not_specialize=["least"])
def logprobs_kernel(logits, row_ids, tokens, chosen, ranks, width, least, BLOCK: tl.constexpr):
    """Store the log-probability of one token of a row, and how many logits are at least as large as its own."""
    answer = tl.program_id(0)
    row = logits + tl.load(row_ids + answer).to(tl.int64) * width
    own = tl.load(row + tl.load(tokens + answer)).to(tl.float32)
    largest, total, rank = tl.full([], float("-inf"), tl.float32), 0.0, tl.zeros([], tl.int32)
    for at in tl.range(0, width, BLOCK):
        columns = at + tl.arange(0, BLOCK)
        inside = columns < width
        numbers = tl.load(row + columns, mask=inside, other=float("-inf")).to(tl.float32)
        rank += tl.sum((inside & (numbers >= own)).to(tl.int32), axis=0)
        upper = tl.maximum(largest, tl.max(numbers, axis=0))
        base = tl.where(upper == float("-inf"), 0.0, upper)
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(numbers - base), axis=0)
        largest = upper
    logprob = own - largest - tl.log(total)
    tl.store(chosen + answer, tl.where(logprob < least, least, logprob))
    tl.store(ranks + answer, rank.to(tl.int64))


@triton.jit
def _weights(row, at, width, largest, temperature, min_p, BLOCK: tl.constexpr):
    """Return BLOCK weights from `at` on, 1 for the most likely token; below `min_p`, and outside, 0."""
    columns = at + tl.arange(0, BLOCK)
    numbers = tl.load(row + columns, mask=columns < width, other=float("-inf"))
    weights = tl.exp(tl.div_rn(numbers - largest, tl.zeros([BLOCK], tl.float32) + temperature))
    return tl.where(weights < min_p, 0.0, weights)


@triton.jit
def _above(row, bits, width, largest, temperature, min_p, BLOCK: tl.constexpr):
    """Return how many weights are above each of three, given as bits, and their sums in fp64."""
    first = bits.to(tl.float32, bitcast=True)
    counts = tl.zeros([4], tl.int32)
    sums = tl.zeros([4], tl.float64)
    for at in tl.range(0, width, BLOCK):
        weights = _weights(row, at, width, largest, temperature, min_p, BLOCK)
        above = weights[:, None] > first[None, :]
        counts += tl.sum(above.to(tl.int32), axis=0)
        sums += tl.sum(tl.where(above, weights[:, None], 0.0).to(tl.float64), axis=0)
    return counts, sums


@triton.jit
def _least_kept(row, limit, wanted, width, largest, temperature, min_p, BLOCK: tl.constexpr):
    """Return the least weight of those kept, as bits, and how many are above it, and their sum.

    A weight is kept while fewer than `limit` are above it and they add up to less than `wanted`. Its bits are found two
    at a time, from the highest on: weights are not negative, so bits and weights have one order.
    """
    low = 0  # every weight with bits below it is dropped
    quarters = tl.arange(0, 4)
    counts, sums = tl.zeros([4], tl.int32), tl.zeros([4], tl.float64)
    for step in tl.range(0, 16):
        found = step == 15  # what is left is to count above it
        shift = tl.maximum(28 - 2 * step, 0)
        bits = low + (tl.where(found, 0, quarters) << shift)
        # At the last number before a quarter: what would be kept if that quarter began the kept ones.
        before = tl.where(found, bits, tl.maximum(bits - 1, 0))
        counts, sums = _above(row, before, width, largest, temperature, min_p, BLOCK)
        dropped = (bits > low) & ((counts >= limit) | (sums >= wanted))
        low += tl.sum(dropped.to(tl.int32), axis=0) << shift
    at_first = quarters == 0
    return low, tl.sum(tl.where(at_first, counts, 0), axis=0), tl.sum(tl.where(at_first, sums, 0.0), axis=0)


@triton.jit
def _kept(weights, least, room, tied_before):
    """Return the weights that are kept, others 0, and the tied ones so far: of those `room` of lowest id are."""
    tied = (weights == least).to(tl.int32)
    within = tied_before + tl.cumsum(tied, axis=0) <= room
    return tl.where((weights > least) | ((tied > 0) & within), weights, 0.0), tied_before + tl.sum(tied, axis=0)


@triton.jit
def draw_kernel(logits, temperatures, min_ps, top_ks, top_ps, chances, tokens, width, BLOCK: tl.constexpr):
    """Choose a token of one row: where the distribution function of what is kept passes `chance`, in order of ids."""
    number = tl.program_id(0)
    row = logits + number.to(tl.int64) * width
    temperature, min_p = tl.load(temperatures + number), tl.load(min_ps + number)
    top_k, top_p = tl.load(top_ks + number), tl.load(top_ps + number)
    largest = float("-inf")
    for at in tl.range(0, width, BLOCK):
        columns = at + tl.arange(0, BLOCK)
        numbers = tl.load(row + columns, mask=columns < width, other=float("-inf"))
        largest = tl.maximum(largest, tl.max(numbers, axis=0))
    limited = (top_k > 0) & (top_k < width)
    limit = tl.where(limited, top_k, width + 1).to(tl.int32)
    least, room, quarters = 0.0, width, tl.arange(0, 4)
    total = tl.zeros([], tl.float64)
    if limited:
        bits, count, total = _least_kept(row, limit, float("inf"), width, largest, temperature, min_p, BLOCK)
        least, room = bits.to(tl.float32, bitcast=True), limit - count
        total += tl.where(bits > 0, room, 0).to(tl.float64) * least.to(tl.float64)
    if top_p < 1.0:  # a share of what the top k add up to
        if not limited:
            total = tl.sum(_above(row, quarters * 0, width, largest, temperature, min_p, BLOCK)[1], axis=0) / 4
        wanted = tl.maximum(top_p, 1e-30) * total
        bits, count, above = _least_kept(row, limit, wanted, width, largest, temperature, min_p, BLOCK)
        least = bits.to(tl.float32, bitcast=True)
        # Of the tied ones those before which less than what is wanted has been kept.
        share = tl.ceil((wanted - above) / tl.where(bits > 0, least, 1.0).to(tl.float64))
        room = tl.minimum(share, (limit - count).to(tl.float64)).to(tl.int32)
    total, tied = tl.zeros([], tl.float64), 0  # anew, in the order of the sums below
    for at in tl.range(0, width, BLOCK):
        kept, tied = _kept(_weights(row, at, width, largest, temperature, min_p, BLOCK), least, room, tied)
        total += tl.sum(kept.to(tl.float64), axis=0)
    target = tl.load(chances + number) * total
    # The block in which the sum passes the target, or the last that holds anything.
    seen, before, tied, tied_there, there = tl.zeros([], tl.float64), tl.zeros([], tl.float64), 0, 0, 0
    for at in tl.range(0, width, BLOCK):
        kept, tied_after = _kept(_weights(row, at, width, largest, temperature, min_p, BLOCK), least, room, tied)
        own = tl.sum(kept.to(tl.float64), axis=0)
        here = (seen <= target) & (own > 0.0)
        before, there, tied_there = (
            tl.where(here, seen, before),
            tl.where(here, at, there),
            tl.where(here, tied, tied_there),
        )
        seen += own
        tied = tied_after
    kept, tied = _kept(_weights(row, there, width, largest, temperature, min_p, BLOCK), least, room, tied_there)
    columns = there + tl.arange(0, BLOCK)
    reached = before + tl.cumsum(kept.to(tl.float64), axis=0)
    first = tl.min(tl.where((reached > target) & (kept > 0.0), columns, NOWHERE), axis=0)
    last = tl.max(tl.where(kept > 0.0, columns, 0), axis=0)  # sums differ by rounding
    tl.store(tokens + number, tl.where(first == NOWHERE, last, first).to(tl.int64))
