"""KV in fp8 and int8: what comes back, which heads have no ordinary scale, where scales lie, and exact bytes."""

from __future__ import annotations

import pytest
import torch

from moewe.attention.paged import paged_attention
from moewe.kvcache import CacheGroup
from moewe.kvcache.scaled import SMALLEST_HEAD, dequantize_heads, quantize_heads
from moewe.kvcache.storage import KVStorage
from moewe.quant import FORMATS, KV_FORMATS, parse_kv_format
from tests.attention.test_paged import KINDS, STEPS, options_of
from tests.support.attention_steps import LAYER, Shape, make_step
from tests.support.numerics import assert_near, assert_same

BOTH = sorted(KV_FORMATS)


def group(name: str, layers: tuple[int, ...] = (0, 1), kind: str = "full") -> CacheGroup:
    heads = 1 if kind == "latent" else 2
    return CacheGroup(
        name=kind, kind=kind, layers=layers, num_kv_heads=heads, head_dim=8, value_dim=6, number_format=KV_FORMATS[name]
    )


@pytest.mark.parametrize("name", BOTH)
def test_values_come_back_within_the_format(name: str) -> None:
    torch.manual_seed(0)
    heads = torch.randn(500, 64)
    for scale in (1.0, 1e-20, 1e30):
        assert_near(dequantize_heads(*quantize_heads(heads * scale, KV_FORMATS[name])), heads * scale, format=name)


@pytest.mark.parametrize("name", BOTH)
def test_each_head_has_the_least_scale_that_cuts_nothing_off(name: str) -> None:
    torch.manual_seed(0)
    held = KV_FORMATS[name]
    heads = torch.randn(200, 2, 16) * torch.randn(200, 2, 1).exp()
    elements, scales = quantize_heads(heads, held)
    assert elements.dtype == held.torch_dtype and scales.dtype == torch.bfloat16 and scales.shape == (200, 2)
    exact = heads.abs().amax(-1) / held.largest
    assert (scales.float() >= exact * (1 - 1e-6)).all() and (scales.float() <= exact * (1 + 2**-7)).all()
    assert (elements.float().abs().amax(-1) <= held.largest).all()
    assert (elements.float().abs().amax(-1) >= held.largest * (1 - 2**-4)).all()


@pytest.mark.parametrize("name", BOTH)
def test_elements_round_to_nearest_even(name: str) -> None:
    largest = KV_FORMATS[name].largest  # the scale is 1
    between = {"int8": [0.5, 1.5, -2.5, 126.5], "fp8": [17.0, 19.0, -(2.0**-10), 3 * 2.0**-10]}[name]
    nearest = {"int8": [0.0, 2.0, -2.0, 126.0], "fp8": [16.0, 20.0, 0.0, 2.0**-8]}[name]
    elements, scales = quantize_heads(torch.tensor([largest, *between]), KV_FORMATS[name])
    assert scales.item() == 1.0
    assert elements.float().tolist() == [largest, *nearest]


@pytest.mark.parametrize("name", BOTH)
def test_zeros_and_what_is_next_to_nothing_have_the_scale_0(name: str) -> None:
    heads = torch.tensor([[0.0, -0.0], [SMALLEST_HEAD / 2, 0.0], [1e-44, -1e-44], [SMALLEST_HEAD, 0.0]])
    elements, scales = quantize_heads(heads, KV_FORMATS[name])
    assert scales[:3].tolist() == [0.0] * 3 and scales[3] > 0
    assert_same(dequantize_heads(elements, scales)[:3], torch.zeros(3, 2))


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", BOTH)
def test_a_number_that_is_not_finite_makes_its_head_nan_and_no_other(name: str, number: float) -> None:
    heads = torch.ones(2, 2, 4)
    heads[1, 0, 2] = number
    values = dequantize_heads(*quantize_heads(heads, KV_FORMATS[name]))
    assert values[1, 0].isnan().all()
    assert values.isfinite().sum() == 12


@pytest.mark.parametrize("name", BOTH)
def test_bytes_are_exact_with_the_scales(name: str) -> None:
    full, latent = group(name), group(name, (2,), "latent")
    assert full.bytes_per_token() == 2 * 2 * (8 + 2 + 6 + 2)
    assert latent.bytes_per_token() == 8 + 2
    storage = KVStorage([full, latent], num_blocks=(3, 5), block_size=4)
    assert storage.num_bytes == 4 * (3 * full.bytes_per_token() + 5 * latent.bytes_per_token())
    assert storage.bytes_by_format() == {name: storage.num_bytes}


@pytest.mark.parametrize("name", BOTH)
def test_scales_lie_under_the_block_numbers_of_their_elements(name: str) -> None:
    """Whoever moves or clears a block by its number moves or clears its scales."""
    storage = KVStorage([group(name), group(name, (2,), "latent")], num_blocks=4, block_size=4)
    torch.manual_seed(0)
    k, v, latent = torch.randn(3, 2, 8), torch.randn(3, 2, 6) * 9, torch.randn(3, 1, 8)
    slots = torch.tensor([13, 2, 3])
    storage.write(1, k, v, slots)
    storage.write(2, latent, None, slots)
    for layer, rows in ((1, (k, v)), (2, (latent, latent[..., :6]))):
        for pages, expected in zip(storage.pages(layer), rows):
            assert pages.scales is not None
            assert pages.scales.shape == pages.elements.shape[:3]
            values = pages.read(torch.arange(4), torch.float32).flatten(0, 1)
            assert_near(values[slots], expected, format=name)
            left = torch.ones(16, dtype=torch.bool)
            left[slots] = False
            assert not values[left].any()
    assert all(not pages.read(torch.arange(4), torch.float32).any() for pages in storage.pages(0))
    storage.zero_blocks([3], 0)
    for pages in storage.pages(1):
        assert pages.scales is not None and not pages.scales[3].any() and pages.scales[0, 2:].all()
        assert not pages.elements.view(torch.uint8)[3].any()
    assert storage.pages(2)[0].scales[3].any()


@pytest.mark.parametrize("options", ["plain", "cap_and_sinks"])
@pytest.mark.parametrize("kind", ["full", "window_odd", "chunk_odd", "narrow_keys", "latent"])
@pytest.mark.parametrize("name", [*BOTH, "bfloat16"])
def test_attention_with_torch_reads_every_format(name: str, kind: str, options: str) -> None:
    made = KINDS[kind]
    shape = Shape(made.heads, made.widths, made.kind, made.window, made.block_size, "float32", name)
    step = make_step(shape, *STEPS["mixed"])
    got = paged_attention(step.q, step.storage, LAYER, step.batch, options_of(options, shape.heads[0]))
    assert_near(got, step.expected(options_of(options, shape.heads[0])), format="float32")


@pytest.mark.parametrize("name", BOTH)
def test_rows_in_bf16_without_kernels_get_values_rounded_to_bf16(name: str) -> None:
    step = make_step(Shape(dtype="bfloat16", kv_dtype=name), *STEPS["mixed"])
    got = paged_attention(step.q, step.storage, LAYER, step.batch, options_of("plain", 4))
    assert_near(got, step.expected(options_of("plain", 4)), format="bfloat16")


@pytest.mark.parametrize("model", ["float32", "bfloat16", "float16"])
def test_formats_by_the_names_that_users_know(model: str) -> None:
    runs_in = FORMATS[model]
    for asked, name in {
        "auto": model, model: model, "bf16": "bfloat16", "torch.bfloat16": "bfloat16", "fp8": "fp8",
        "fp8_e4m3": "fp8", "FP8": "fp8", "fp8_per_token_head": "fp8", "int8": "int8", "int8_per_token_head": "int8",
    }.items():  # fmt: skip
        assert parse_kv_format(asked, runs_in).name == name
    for asked in ("fp8_e5m2", "int4", "", "mxfp4"):
        with pytest.raises(ValueError, match=f"kv_cache_dtype='{asked}' is not available with dtype {model}"):
            parse_kv_format(asked, runs_in)


def test_a_model_keeps_no_wider_kv_than_its_own() -> None:
    for asked in ("float32", "float16"):
        with pytest.raises(ValueError, match="use auto, bfloat16, fp8, int8"):
            parse_kv_format(asked, FORMATS["bfloat16"])
