"""Attention over pages in Triton: a tile of queries walks the keys that it sees; attend.py launches it.

Flash attention (Dao et al., 2022; Milakov and Gimelshein, 2018) with exponents to base 2. Rows are pairs of a token
and a query head of one KV head. A head of K is two parts, MAIN and REST wide (128 + 64 of 192, 512 + 64 of a latent),
so that no tile is padded to twice its width. Keys are walked in tiles that begin at multiples of BLOCK_N positions, and
a tile that a row sees nothing of changes no bit of it: a row's bits do not depend on the rows beside it.
Letters: M rows of a tile, G query heads of a KV head, Dh and Dv widths of a head of K and V, R runs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...native.gpu.numbers_triton import product, rounded
from .kv_triton import kv_numbers

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def first_seen(positions, KIND: tl.constexpr, WINDOW: tl.constexpr):
    """Return the first position that rows at `positions` see (kvcache/groups.py, `first_visible`)."""
    if KIND == "window":
        first = tl.where(positions >= WINDOW, positions - WINDOW + 1, 0)
    elif KIND == "chunk":
        first = positions // WINDOW * WINDOW
    else:
        first = positions * 0
    return first


@triton.jit
def walk(
    total, largest, out, q_main, q_rest, k, v, k_scales, v_scales, table, firsts, lasts, begin, start, stop,
    kv_heads, scale, cap, MAIN: tl.constexpr, REST: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, V_STRIDE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr, SHARES_V: tl.constexpr, FORMAT: tl.constexpr, FP8_BYTES: tl.constexpr,
):  # fmt: skip
    """Let M rows attend to positions [start, stop) of one sequence, `start` a multiple of BLOCK_N.

    Args: total [M] of weights, largest [M] score (to base 2) and out [M, VALUE_BLOCK], so far; q_main [M, MAIN], q_rest
    [M, REST]; k, v and their scales point to the head in block 0; firsts and lasts [M], what rows see; nothing before
    `begin` and from `stop` on is read. Where not MASKED, every row sees all. SHARES_V: values are the keys' MAIN part.
    """
    kind: tl.constexpr = q_main.dtype
    main_columns = tl.arange(0, MAIN)[None, :]
    for at in tl.range(start, stop, BLOCK_N):
        keys = at + tl.arange(0, BLOCK_N)
        if MASKED:
            present = (keys >= begin) & (keys < stop)
            blocks = tl.load(table + keys // BLOCK_SIZE, mask=present, other=0)
        else:
            blocks = tl.load(table + keys // BLOCK_SIZE)
        slots = (blocks.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE) * kv_heads  # in heads
        here = (slots * HEAD_DIM)[:, None]
        if MASKED:
            k_codes = tl.load(k + here + main_columns, mask=present[:, None], other=0)
        else:
            k_codes = tl.load(k + here + main_columns)
        k_main = kv_numbers(k_codes, kind, FORMAT, FP8_BYTES)
        scores = product(q_main, tl.trans(k_main), tl.zeros([q_main.shape[0], BLOCK_N], tl.float32))
        if REST > 0:
            rest_columns = tl.arange(0, REST)[None, :] + MAIN
            inside = rest_columns < HEAD_DIM
            if MASKED:
                inside = inside & present[:, None]
            rest_codes = tl.load(k + here + rest_columns, mask=inside, other=0)
            scores = product(q_rest, tl.trans(kv_numbers(rest_codes, kind, FORMAT, FP8_BYTES)), scores)
        if cap is None:
            scores = scores * (scale * LOG2_E)
        else:
            scores = scores * scale
        if FORMAT != "plain":
            if MASKED:
                key_scales = tl.load(k_scales + slots, mask=present, other=0.0)
            else:
                key_scales = tl.load(k_scales + slots)
            scores = scores * key_scales.to(tl.float32)[None, :]
        if cap is not None:  # cap * tanh(scores / cap)
            scores = cap - 2.0 * cap / (1.0 + tl.exp2(scores * (2.0 * LOG2_E / cap)))
            scores = scores * LOG2_E
        if MASKED:
            visible = (keys[None, :] >= firsts[:, None]) & (keys[None, :] <= lasts[:, None]) & present[None, :]
            scores = tl.where(visible, scores, float("-inf"))
        upper = tl.maximum(largest, tl.max(scores, axis=1))
        base = tl.where(upper == float("-inf"), 0.0, upper)  # of a row that has seen nothing yet
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(largest - base)
        total = total * fade + tl.sum(weights, axis=1)
        if SHARES_V:
            values = k_main
        else:
            value_columns = tl.arange(0, VALUE_BLOCK)[None, :]
            inside = value_columns < VALUE_DIM
            if MASKED:
                inside = inside & present[:, None]
            codes = tl.load(v + (slots * V_STRIDE)[:, None] + value_columns, mask=inside, other=0)
            values = kv_numbers(codes, kind, FORMAT, FP8_BYTES)
        if FORMAT != "plain":
            if SHARES_V:
                value_scales = key_scales
            elif MASKED:
                value_scales = tl.load(v_scales + slots, mask=present, other=0.0)
            else:
                value_scales = tl.load(v_scales + slots)
            weights = weights * value_scales.to(tl.float32)[None, :]
            if MASKED:  # a scale that is no number counts only where it is seen
                weights = tl.where(visible, weights, 0.0)
        out = product(rounded(weights, kind), values, out * fade[:, None])
        largest = upper
    return total, largest, out


@triton.jit
def _load_queries(q, at, inside, MAIN: tl.constexpr, REST: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return both parts of queries, [M, MAIN] and [M, REST]; the first twice where there is no other."""
    main = tl.load(q + at[:, None] + tl.arange(0, MAIN)[None, :], mask=inside[:, None], other=0.0)
    rest = main
    if REST > 0:
        columns = tl.arange(0, REST)[None, :] + MAIN
        rest = tl.load(q + at[:, None] + columns, mask=inside[:, None] & (columns < HEAD_DIM), other=0.0)
    return main, rest


@triton.jit(do_not_specialize=["kv_heads", "group", "num_splits", "scale", "cap"])
def decode_kernel(
    q, partial, stats, k, v, k_scales, v_scales, runs, tables, kv_heads, group, num_splits, scale, cap,
    MAIN: tl.constexpr, REST: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, V_STRIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SPLIT: tl.constexpr, KIND: tl.constexpr, WINDOW: tl.constexpr, SHARES_V: tl.constexpr,
    FORMAT: tl.constexpr, FP8_BYTES: tl.constexpr,
):  # fmt: skip
    """One row, up to BLOCK_M query heads of a KV head, positions [split * SPLIT, (split + 1) * SPLIT).

    Leaves sums of weighted values, [R, H, splits, Dv] f32, and the largest score and the total, [R, H, splits, 2].
    """
    run, split = tl.program_id(0), tl.program_id(2)
    parts = tl.cdiv(group, BLOCK_M)
    kv_head, part = tl.program_id(1) // parts, tl.program_id(1) % parts
    row = tl.load(runs + run * 4)
    position = tl.load(runs + run * 4 + 2).to(tl.int32)
    table = tables + tl.load(runs + run * 4 + 3)
    first = first_seen(position, KIND, WINDOW)
    begin = tl.maximum(first, split * SPLIT)
    stop = tl.minimum(position + 1, (split + 1) * SPLIT)
    if begin < stop:
        # What all heads have in common is a number, not a block: blocks would wait in registers while keys are walked.
        own = tl.arange(0, BLOCK_M)
        inside = own < group - part * BLOCK_M
        first_head = kv_head * group + part * BLOCK_M
        num_heads = kv_heads * group
        queries = q + (row * num_heads + first_head) * HEAD_DIM
        q_main, q_rest = _load_queries(queries, own * HEAD_DIM, inside, MAIN, REST, HEAD_DIM)
        total, largest, out = walk(
            tl.zeros([BLOCK_M], tl.float32), tl.full([BLOCK_M], float("-inf"), tl.float32),
            tl.zeros([BLOCK_M, VALUE_BLOCK], tl.float32), q_main, q_rest, k + kv_head * HEAD_DIM,
            v + kv_head * V_STRIDE, k_scales + kv_head if FORMAT != "plain" else None,
            v_scales + kv_head if FORMAT != "plain" else None, table,
            tl.full([BLOCK_M], 0, tl.int32) + first, tl.full([BLOCK_M], 0, tl.int32) + position, begin,
            begin // BLOCK_N * BLOCK_N, stop, kv_heads, scale, cap, MAIN, REST, HEAD_DIM, VALUE_DIM, VALUE_BLOCK,
            V_STRIDE, BLOCK_N, BLOCK_SIZE, True, SHARES_V, FORMAT, FP8_BYTES,
        )  # fmt: skip
        place = (run.to(tl.int64) * num_heads + first_head) * num_splits + split
        others = own * num_splits  # of the head `own` behind the first one's
        columns = tl.arange(0, VALUE_BLOCK)[None, :]
        here = partial + place * VALUE_DIM
        tl.store(here + (others * VALUE_DIM)[:, None] + columns, out, mask=inside[:, None] & (columns < VALUE_DIM))
        tl.store(stats + place * 2 + others * 2, largest, mask=inside)
        tl.store(stats + place * 2 + others * 2 + 1, total, mask=inside)


@triton.jit
def _with_sink(total, largest, sinks, heads, inside):
    """Return the total [M] with each head's sink, a score that weighs no value."""
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=inside, other=0.0) * LOG2_E
        total = total + tl.exp2(sink - largest)  # inf far above the scores: nothing is left, as it should be
    return total


@triton.jit(do_not_specialize=["num_heads", "num_splits"])
def combine_splits_kernel(
    partial, stats, sinks, out, runs, num_heads, num_splits, VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr, SPLIT: tl.constexpr, KIND: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One row and query head: add up its splits, SPLITS_BLOCK at a time, from absolute position 0 on."""
    run, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(runs + run * 4)
    position = tl.load(runs + run * 4 + 2).to(tl.int32)
    begin = first_seen(position, KIND, WINDOW) // SPLIT
    stop = position // SPLIT + 1
    columns = tl.arange(0, VALUE_BLOCK)[None, :]
    places = (run.to(tl.int64) * num_heads + head) * num_splits
    largest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    values = tl.zeros([1, VALUE_BLOCK], tl.float32)
    for at in tl.range(begin // SPLITS_BLOCK * SPLITS_BLOCK, stop, SPLITS_BLOCK):
        splits = at + tl.arange(0, SPLITS_BLOCK)
        present = (splits >= begin) & (splits < stop)
        tops = tl.load(stats + (places + splits) * 2, mask=present, other=float("-inf"))
        sums = tl.load(stats + (places + splits) * 2 + 1, mask=present, other=0.0)
        upper = tl.maximum(largest, tl.max(tops, axis=0))
        fade, weights = tl.exp2(largest - upper), tl.exp2(tops - upper)
        inside = present[:, None] & (columns < VALUE_DIM)
        parts = tl.load(partial + ((places + splits) * VALUE_DIM)[:, None] + columns, mask=inside, other=0.0)
        total = total * fade + tl.sum(sums * weights, axis=0)
        values = values * fade[:, None] + tl.sum(parts * weights[:, None], axis=0)[None, :]
        largest = upper
    heads = head + tl.arange(0, 1)
    total = _with_sink(total, largest, sinks, heads, heads < num_heads)
    here = (row * num_heads + head) * VALUE_DIM + columns
    tl.store(out + here, rounded(values / total[:, None], out.dtype.element_ty), mask=columns < VALUE_DIM)


@triton.jit(do_not_specialize=["kv_heads", "group", "scale", "cap"])
def prefill_kernel(
    q, out, k, v, k_scales, v_scales, sinks, runs, tables, tiles, kv_heads, group, scale, cap,
    MAIN: tl.constexpr, REST: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, V_STRIDE: tl.constexpr, BLOCK_M: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, KIND: tl.constexpr, WINDOW: tl.constexpr, SHARES_V: tl.constexpr,
    FORMAT: tl.constexpr, FP8_BYTES: tl.constexpr,
):  # fmt: skip
    """BLOCK_M / HEADS rows of one run with HEADS query heads of a KV head each; `tiles` [n, 2]: run, first row."""
    ROWS: tl.constexpr = BLOCK_M // HEADS
    tile = tl.program_id(0)
    parts = tl.cdiv(group, HEADS)
    kv_head, part = tl.program_id(1) // parts, tl.program_id(1) % parts
    run, offset = tl.load(tiles + tile * 2), tl.load(tiles + tile * 2 + 1)
    row_start, num_rows = tl.load(runs + run * 4), tl.load(runs + run * 4 + 1).to(tl.int32)
    start_position = tl.load(runs + run * 4 + 2).to(tl.int32)
    table = tables + tl.load(runs + run * 4 + 3)
    within = offset + tl.arange(0, BLOCK_M) // HEADS
    own = part * HEADS + tl.arange(0, BLOCK_M) % HEADS
    inside = (within < num_rows) & (own < group)
    num_heads = kv_heads * group
    heads = kv_head * group + own
    places = (row_start + within) * num_heads + heads
    q_main, q_rest = _load_queries(q, places * HEAD_DIM, inside, MAIN, REST, HEAD_DIM)
    lasts = start_position + tl.minimum(within, num_rows - 1)
    firsts = first_seen(lasts, KIND, WINDOW)
    earliest = start_position + offset
    begin = first_seen(earliest, KIND, WINDOW)
    stop = start_position + tl.minimum(offset + ROWS, num_rows)
    k += kv_head * HEAD_DIM
    v += kv_head * V_STRIDE
    if FORMAT != "plain":
        k_scales += kv_head
        v_scales += kv_head
    total = tl.zeros([BLOCK_M], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    values = tl.zeros([BLOCK_M, VALUE_BLOCK], tl.float32)
    masked_from = begin // BLOCK_N * BLOCK_N
    if KIND == "full":
        masked_from = (earliest + 1) // BLOCK_N * BLOCK_N  # all rows see all keys before it
        total, largest, values = walk(
            total, largest, values, q_main, q_rest, k, v, k_scales, v_scales, table, firsts, lasts, 0, 0, masked_from,
            kv_heads, scale, cap, MAIN, REST, HEAD_DIM, VALUE_DIM, VALUE_BLOCK, V_STRIDE, BLOCK_N, BLOCK_SIZE, False,
            SHARES_V, FORMAT, FP8_BYTES,
        )  # fmt: skip
    total, largest, values = walk(
        total, largest, values, q_main, q_rest, k, v, k_scales, v_scales, table, firsts, lasts, begin, masked_from,
        stop, kv_heads, scale, cap, MAIN, REST, HEAD_DIM, VALUE_DIM, VALUE_BLOCK, V_STRIDE, BLOCK_N, BLOCK_SIZE, True,
        SHARES_V, FORMAT, FP8_BYTES,
    )  # fmt: skip
    total = _with_sink(total, largest, sinks, heads, inside)
    columns = tl.arange(0, VALUE_BLOCK)[None, :]
    tl.store(
        out + (places * VALUE_DIM)[:, None] + columns, rounded(values / total[:, None], out.dtype.element_ty),
        mask=inside[:, None] & (columns < VALUE_DIM),
    )  # fmt: skip
