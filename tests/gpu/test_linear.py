"""Products of all rows with one matrix, by the kernels of experts: against torch, in every format that they read."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moewe.moe.experts import gated_ffn
from moewe.moe.kernels.linear import head_linear, linear, logits
from moewe.native.gpu import TARGETS, GpuKernels
from moewe.quant import FP8_BLOCK, INT4_GROUP, INT8_BLOCK, MXFP4_SCHEME, QuantScheme, dense
from moewe.quant import linear as plain
from tests.support.numerics import assert_near, assert_same
from tests.support.stored import stored

PLAIN, FIXED = (GpuKernels(target=TARGETS[90], batch_invariant=fixed) for fixed in (False, True))
FORMATS = {
    "fp8_blocks": QuantScheme(kind=FP8_BLOCK, block=(16, 32)),
    "int8_channel": QuantScheme(kind=INT8_BLOCK, block=(1, 64)),
    "int4": QuantScheme(kind=INT4_GROUP, block=(1, 32)),
    "mxfp4": MXFP4_SCHEME,
}


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * shape[-1] ** -0.5).to(dtype)


@pytest.mark.parametrize(("name", "rows"), [*((name, 5) for name in FORMATS), ("int8_channel", 150)])
def test_stored_weights_are_multiplied_as_they_are(name: str, rows: int) -> None:
    """By both schedules of tiles; of a fused matrix, whose parts have scales of their own."""
    weight = stored(FORMATS[name], 1, 48, 64, sections=3, seed=1).select(0)
    x, bias = noise(rows, 64), noise(48)
    assert_near(linear(x, weight, bias, PLAIN), plain.linear(x.float(), weight, bias.float()), format="bfloat16")


def test_what_no_kernel_reads_is_left_to_torch() -> None:
    for scheme, sections in ((QuantScheme(kind=FP8_BLOCK, block=(48, 32)), 2), (FORMATS["fp8_blocks"], 1)):
        weight, x = stored(scheme, 1, 48, 64, sections=sections, seed=1).select(0), noise(3, 64)
        ours, theirs = linear(x, weight, None, PLAIN), plain.linear(x, weight)
        assert torch.equal(ours, theirs) == (sections == 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fixed_tiles_give_a_row_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    x, weight, heads = noise(70, 40, dtype=dtype), noise(24, 40, dtype=dtype), noise(2, 24, 20, dtype=dtype)
    format_name = str(dtype).removeprefix("torch.")
    whole, by_head = linear(x, weight, None, FIXED), head_linear(x.view(70, 2, 20), heads, FIXED)
    assert_near(whole, x.float() @ weight.float().T, format=format_name)
    assert_near(by_head, plain.head_linear(x.view(70, 2, 20).float(), heads.float()), format=format_name)
    for rows in (slice(0, 1), slice(3, 9)):
        assert_same(linear(x[rows], weight, None, FIXED), whole[rows])
        assert_same(head_linear(x[rows].view(-1, 2, 20), heads, FIXED).contiguous(), by_head[rows].contiguous())
        assert_same(logits(x[rows], weight, None, FIXED), whole[rows].float())


@pytest.mark.parametrize("name", ["fp8_blocks", "plain"])
def test_an_ffn_of_all_rows(name: str) -> None:
    w13, w2 = noise(64, 32), noise(32, 32)
    if name != "plain":
        w13, w2 = (stored(FORMATS[name], 1, n, 32, sections=s, seed=s).select(0) for n, s in ((64, 2), (32, 1)))
    biases = {"b13": noise(64), "b2": noise(32)}
    x, weights = noise(3, 32), SimpleNamespace(w13=w13, w2=w2, **biases)
    expected = gated_ffn(x.float(), SimpleNamespace(
        w13=dense(w13, torch.float32).float(), w2=dense(w2, torch.float32).float(),
        **{key: value.float() for key, value in biases.items()}))  # fmt: skip
    assert_near(gated_ffn(x, weights, kernels=FIXED), expected, format="bfloat16")


def test_no_rows_at_all() -> None:
    assert linear(noise(0, 40), noise(24, 40), None, FIXED).shape == (0, 24)
    assert head_linear(noise(0, 2, 20), noise(2, 24, 20), FIXED).shape == (0, 2, 24)
