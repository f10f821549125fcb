"""The grouped FFN against its reference, with slots that get nothing and memory full of NaN (P-EP-04)."""

from __future__ import annotations

import pytest
import torch

from moewe.moe.activation import SILU, Activation
from moewe.moe.experts import gated_ffn, grouped_ffn
from moewe.moe.gated import ExpertWeights
from moewe.moe.reference import grouped_ffn_reference
from moewe.quant import FP8_BLOCK, MXFP4_SCHEME, QuantScheme, QuantTensor
from tests.support.numerics import assert_near, assert_same
from tests.support.pairwise import each_pair

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


CLAMPED = Activation(kind="clamped", alpha=1.5, limit=0.75)


def with_biases(weights: ExpertWeights) -> ExpertWeights:
    generator = torch.Generator().manual_seed(2)
    weights.b13 = torch.randn(weights.w13.shape[:2], generator=generator).to(weights.w2.dtype)
    weights.b2 = torch.randn(weights.w2.shape[:2], generator=generator).to(weights.w2.dtype)
    return weights


@each_pair(
    counts=COUNTS,
    number_format=FORMATS.keys(),
    shape=[(64, 48), (40, 17)],
    activation={"silu": SILU, "clamped": CLAMPED},
)
def test_biases_and_activations(
    counts: list[int], number_format: str, shape: tuple[int, int], activation: Activation
) -> None:
    dtype = FORMATS[number_format]
    weights = with_biases(experts(len(counts), *shape, dtype))
    rows = torch.randn(sum(counts), shape[0], generator=torch.Generator().manual_seed(1)).to(dtype)
    tokens_per_slot = torch.tensor(counts)
    actual = grouped_ffn(rows, tokens_per_slot, weights, activation)
    expected = grouped_ffn_reference(rows, tokens_per_slot, weights, activation)
    assert_near(actual, expected, format=number_format)
    per_slot = 3 * shape[0] * shape[1] + 2 * shape[1] + shape[0]
    assert weights.bytes_per_slot == per_slot * dtype.itemsize


def test_the_clamp_cuts_gates_above_and_ups_on_both_sides() -> None:
    """One hidden element; the products are the identity, so the gate is x[0] and the up is x[1]."""
    weights = ExpertWeights(w13=torch.eye(2)[None], w2=torch.ones(1, 2, 1))
    rows = torch.tensor([[9.0, 9.0], [-9.0, -9.0], [0.5, 0.25]])
    gate, up = torch.tensor([0.75, -9.0, 0.5]), torch.tensor([0.75, -0.75, 0.25])
    expected = gate * torch.sigmoid(1.5 * gate) * (up + 1)
    actual = grouped_ffn(rows, torch.tensor([3]), weights, CLAMPED)
    assert_near(actual, expected[:, None].expand(3, 2), format="float32")


def test_one_ffn_for_all_rows_is_one_expert_with_all_rows() -> None:
    weights = with_biases(experts(1, 40, 16, torch.float32))
    one = ExpertWeights(w13=weights.w13[0], w2=weights.w2[0], b13=weights.b13[0], b2=weights.b2[0])
    rows = torch.randn(5, 40)
    for activation in (SILU, CLAMPED):
        expected = grouped_ffn_reference(rows, torch.tensor([5]), weights, activation)
        assert_near(gated_ffn(rows, one, activation), expected, format="float32")


def quantised(num_slots: int, rows: int, columns: int, kind: str, sections: tuple[int, ...]) -> QuantTensor:
    generator = torch.Generator().manual_seed(rows)
    if kind == FP8_BLOCK:
        scheme = QuantScheme(kind=FP8_BLOCK, block=(32, 32))
        data = torch.randn(num_slots, rows, columns, generator=generator).to(torch.float8_e4m3fn)
        num_scales = sum(-(-section // 32) for section in sections)
        scales = torch.rand(num_slots, num_scales, -(-columns // 32), generator=generator) / 8
    else:
        scheme = MXFP4_SCHEME
        data = torch.randint(0, 256, (num_slots, rows, columns // 2), generator=generator).to(torch.uint8)
        scales = torch.randint(122, 126, (num_slots, rows, columns // 32), generator=generator).to(torch.uint8)
    return QuantTensor(data=data, scales=scales, scheme=scheme, shape=(num_slots, rows, columns), sections=sections)


@pytest.mark.parametrize("kind", ["mxfp4", FP8_BLOCK])
@pytest.mark.parametrize("counts", [COUNTS["some_empty"], COUNTS["all_used"], COUNTS["nothing"]], ids=str)
def test_quantised_experts(kind: str, counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only matrices of slots with rows are dequantised, and one expert's bytes are those of data, scales and biases."""
    w13, w2 = quantised(4, 64, 96, kind, (32, 32)), quantised(4, 96, 32, kind, (96,))
    weights = ExpertWeights(w13=w13, w2=w2, b13=torch.randn(4, 64), b2=torch.randn(4, 96))
    rows = torch.randn(sum(counts), 96, generator=torch.Generator().manual_seed(1))
    expected = grouped_ffn_reference(rows, torch.tensor(counts), weights, CLAMPED)
    read: list[tuple[int, ...]] = []
    dequantize = QuantTensor.dequantize

    def count(tensor: QuantTensor, dtype: torch.dtype) -> torch.Tensor:
        read.append(tensor.shape)
        return dequantize(tensor, dtype)

    monkeypatch.setattr(QuantTensor, "dequantize", count)
    assert_near(grouped_ffn(rows, torch.tensor(counts), weights, CLAMPED), expected, format="float32")
    hit = sum(count > 0 for count in counts)
    assert sorted(read) == [(64, 96)] * hit + [(96, 32)] * hit
    assert 4 * weights.bytes_per_slot == w13.num_bytes + w2.num_bytes + 4 * 4 * (64 + 96)
