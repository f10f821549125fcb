"""The grouped FFN against its reference, with slots that get nothing and memory full of NaN (P-EP-04)."""

from __future__ import annotations

import pytest
import torch

from moewe.moe.experts import ExpertWeights, grouped_ffn
from moewe.moe.reference import grouped_ffn_reference
from tests.support.numerics import assert_near, assert_same

FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
COUNTS = {
    "all_used": [3, 1, 4, 1],
    "some_empty": [0, 5, 0, 2],
    "first_and_last_empty": [0, 1, 1, 0],
    "one_gets_all": [0, 0, 33, 0],
    "one_row": [0, 0, 0, 1],
    "nothing": [0, 0, 0, 0],
}


def experts(num_slots: int, width: int, ffn_width: int, dtype: torch.dtype) -> ExpertWeights:
    generator = torch.Generator().manual_seed(0)
    return ExpertWeights(
        w13=(torch.randn(num_slots, 2 * ffn_width, width, generator=generator) * width**-0.5).to(dtype),
        w2=(torch.randn(num_slots, width, ffn_width, generator=generator) * ffn_width**-0.5).to(dtype),
    )


def poison(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Free memory full of NaN, so that the allocator hands it out again."""
    blocks = [torch.full(shape, torch.nan, dtype=dtype) for _ in range(8)]
    del blocks


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("shape", [(64, 48), (40, 17)], ids=str)
def test_grouped_ffn_equals_reference(counts: list[int], number_format: str, shape: tuple[int, int]) -> None:
    dtype = FORMATS[number_format]
    weights = experts(len(counts), *shape, dtype)
    rows = torch.randn(sum(counts), shape[0], generator=torch.Generator().manual_seed(1)).to(dtype)
    tokens_per_slot = torch.tensor(counts)
    for size in {rows.shape, (sum(counts), 2 * shape[1]), (sum(counts), shape[1])}:
        poison(size, dtype)
    actual = grouped_ffn(rows, tokens_per_slot, weights)
    assert actual.dtype == dtype
    assert_near(actual, grouped_ffn_reference(rows, tokens_per_slot, weights), format=number_format)


def test_experts_without_rows_are_not_read() -> None:
    weights = experts(4, 16, 8, torch.float32)
    rows = torch.randn(3, 16)
    expected = grouped_ffn(rows, torch.tensor([0, 2, 0, 1]), weights)
    weights.w13[[0, 2]], weights.w2[[0, 2]] = torch.nan, torch.nan
    assert_same(grouped_ffn(rows, torch.tensor([0, 2, 0, 1]), weights), expected)


def test_a_row_that_is_not_finite_stays_alone() -> None:
    weights = experts(2, 16, 8, torch.float32)
    rows = torch.randn(5, 16)
    expected = grouped_ffn(rows, torch.tensor([3, 2]), weights)
    rows[1] = torch.nan
    actual = grouped_ffn(rows, torch.tensor([3, 2]), weights)
    assert actual[1].isnan().all()
    keep = [0, 2, 3, 4]
    assert_same(actual[keep], expected[keep])


def test_weights_replaced_in_place_are_seen() -> None:
    weights = experts(2, 16, 8, torch.float32)
    rows, counts = torch.randn(2, 16), torch.tensor([1, 1])
    before = grouped_ffn(rows, counts, weights)
    weights.w13[0].copy_(weights.w13[1])
    weights.w2[0].copy_(weights.w2[1])
    after = grouped_ffn(rows, counts, weights)
    assert_same(after[1], before[1])
    assert_same(after[0], grouped_ffn(rows[:1], torch.tensor([0, 1]), weights)[0])


def test_bytes_per_slot_are_exact() -> None:
    assert experts(3, 16, 8, torch.bfloat16).bytes_per_slot == 3 * 16 * 8 * 2
    assert experts(0, 16, 8, torch.float32).bytes_per_slot == 3 * 16 * 8 * 4
