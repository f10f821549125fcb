"""Memory of steps of single rows: as much as the budget sets aside for it."""

from __future__ import annotations

import itertools

import torch

from moewe.attention.kernels.decode_rows import DecodeRows
from moewe.topologies.kv_sizes import StepLimits, decode_rows_bytes, table_bytes

GROUPS = (("full", 0), ("window", 6), ("full", 0))


def test_it_holds_what_the_budget_counts() -> None:
    for most_rows, num_groups, max_blocks in itertools.product((1, 2, 7, 64), (1, 2, 3), (1, 5, 32)):
        rows = DecodeRows(
            most_rows=most_rows,
            groups=GROUPS[:num_groups],
            max_blocks=max_blocks,
            block_size=4,
            device=torch.device("cpu"),
        )
        tensors = (rows._numbers, rows.tables)
        held = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        assert rows.num_bytes == held == decode_rows_bytes(most_rows, num_groups, max_blocks)
        limits = StepLimits(
            max_num_batched_tokens=8, max_model_len=4 * max_blocks - 1, max_num_seqs=most_rows, block_size=4
        )
        assert table_bytes(num_groups, limits) == held + 4 * num_groups * most_rows * max_blocks
