"""Paged attention equals the slow reference on mixed steps, whatever blocks the sequences lie in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from moewe.attention import reference
from moewe.attention.batch import AttentionOptions
from moewe.attention.build import build_attention_batch
from moewe.attention.paged import paged_attention
from moewe.kvcache import CacheGroup, KVStorage
from moewe.quant import FORMATS
from tests.support.numerics import assert_near

BLOCK = 4


@dataclass
class Rows:
    row_start: int
    num_rows: int
    num_computed_tokens: int
    block_table: np.ndarray


def make(segments: list[tuple[int, int]], decodes: list[int], heads: tuple[int, int], dtype: str, seed: int = 0):
    """A step with prompt pieces (computed, rows) and single rows of sequences of the lengths given."""
    rng = np.random.default_rng(seed)
    fmt = FORMATS[dtype]
    num_heads, num_kv_heads = heads
    lengths = decodes + [computed + rows for computed, rows in segments]
    blocks = [-(-n // BLOCK) for n in lengths]
    order = rng.permutation(sum(blocks) + 3)
    tables, at = [], 0
    for n in blocks:
        tables.append(order[at : at + n].astype(np.int64))
        at += n
    group = CacheGroup(
        name="g", kind="full", layers=(0, 3), num_kv_heads=num_kv_heads, head_dim=8, value_dim=8, number_format=fmt
    )
    storage = KVStorage([group], num_blocks=len(order), block_size=BLOCK)
    torch.manual_seed(seed)
    for table, length in zip(tables, lengths):
        places = np.arange(length)
        slots = torch.from_numpy(table[places // BLOCK] * BLOCK + places % BLOCK)
        k, v = torch.randn(2, length, num_kv_heads, 8).to(fmt.torch_dtype)
        storage.write(3, k, v, slots)
    width = max(blocks[: len(decodes)], default=0)
    decode_tables = np.zeros((len(decodes), width), np.int64)
    for i, table in enumerate(tables[: len(decodes)]):
        decode_tables[i, : len(table)] = table
    runs, row = [], len(decodes)
    for (computed, rows), table in zip(segments, tables[len(decodes) :]):
        runs.append(Rows(row, rows, computed, table))
        row += rows
    batch = build_attention_batch(
        slot_mapping=np.zeros(row, np.int64),
        segments=runs,
        decode_lengths=np.array(decodes, np.int64),
        decode_tables=decode_tables,
        block_size=BLOCK,
        device=torch.device("cpu"),
    )
    q = torch.randn(row, num_heads, 8).to(fmt.torch_dtype)
    return q, storage, batch


CASES = {
    "nothing": ([], []),
    "one_decode": ([], [1]),
    "block_borders": ([], [3, 4, 5, 8, 9]),
    "one_long_many_short": ([], [1, 2, 40, 3, 2]),
    "whole_prompt": ([(0, 9)], []),
    "chunk_behind_context": ([(7, 5)], []),
    "chunk_of_one": ([(0, 1), (6, 1)], []),
    "mixed": ([(0, 3), (10, 6), (4, 1)], [17, 1, 5]),
}


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_paged_attention_equals_reference(case, dtype, heads) -> None:
    q, storage, batch = make(*case, heads, dtype)
    got = paged_attention(q, storage, 3, batch, AttentionOptions(0.3))
    assert got.dtype == q.dtype and got.shape == q.shape
    assert_near(got.float(), reference.paged_attention(q, storage, 3, batch, AttentionOptions(0.3)), format=dtype)


def test_kv_tokens_read_counts_what_each_row_group_reads() -> None:
    _, _, batch = make([(0, 3), (10, 6)], [17, 1], (4, 2), "float32")
    assert batch.kv_tokens_read == 17 + 1 + 3 + 16


def test_rows_read_only_their_own_blocks() -> None:
    q, storage, batch = make([(2, 3)], [5, 9], (4, 2), "float32")
    before = paged_attention(q, storage, 3, batch, AttentionOptions(0.3))
    used = {int(b) for bucket in batch.decodes for b in bucket.block_table.flatten()}
    used |= {int(b) for segment in batch.prefills for b in segment.block_table}
    others = [b for b in range(storage.num_blocks[0]) if b not in used]
    for tensor in storage.layer(3):
        tensor[others] = float("nan")
    assert torch.equal(paged_attention(q, storage, 3, batch, AttentionOptions(0.3)), before)
