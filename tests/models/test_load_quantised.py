"""Quantised checkpoints load as they are: every byte where it belongs, on every rank, and nothing read twice."""

import pytest
import torch

from moewe.models.config import ConfigError
from moewe.models.families import load_config
from moewe.models.headers import check_weights
from moewe.models.loading import LoadOptions, load_weights
from moewe.moe.wide_ep.placement import linear_placement
from moewe.quant import QuantTensor
from moewe.quant.reference import dequantize_reference
from tests.support.fixtures import edit_config, read_tensors, rewrite_tensors
from tests.support.loaded import assert_same_as_reference
from tests.support.quantised import GPT_OSS_KEPT, fp8_checkpoint, mxfp4_checkpoint

pytestmark = pytest.mark.slow

BLOCK = (24, 40)  # divides neither the widths nor the heads of the fixtures
GOS = {"intermediate_size": 96}


def load(path, ranks=1, rank=0, dtype=torch.float32, **options):
    config = load_config(path)
    placement = linear_placement(len(config.moe_layers), config.moe.routing.num_experts, ranks)
    return load_weights(path, config, LoadOptions(placement=placement, rank=rank, dtype=dtype, **options))


def refusal(path):
    with pytest.raises(ConfigError) as caught:
        check_weights(path, load_config(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def plain(node):
    """Replace every quantised matrix below a record by its numbers, one at a time."""
    for name, value in vars(node).items():
        if isinstance(value, QuantTensor):
            slots = [value.select(i) for i in range(value.shape[0])] if len(value.shape) == 3 else [value]
            numbers = [dequantize_reference(slot) for slot in slots]
            setattr(node, name, torch.stack(numbers) if len(value.shape) == 3 else numbers[0])
        elif hasattr(value, "__dict__") and not isinstance(value, torch.Tensor):
            plain(value)
        elif isinstance(value, list):
            for child in value:
                plain(child)
    return node


def quantised(weights):
    return {path.rsplit(".", 1)[0] for path, _ in weights.tensors() if path.endswith(".scales")}


@pytest.mark.parametrize("ranks", [1, 4])
def test_mxfp4_experts_load_as_they_are(ranks):
    path, numbers = mxfp4_checkpoint("T-GOS", **GOS)
    for rank in range(ranks):
        report = load(path, ranks, rank)
        count = 8 // ranks
        assert quantised(report.weights) == {f"layers.{i}.moe.experts.{w}" for i in range(4) for w in ("w13", "w2")}
        w13 = report.weights.layers[0].moe.experts.w13
        assert w13.shape == (count, 192, 64) and w13.sections == (96, 96)
        local = range(rank * count, (rank + 1) * count)
        assert_same_as_reference(plain(report.weights), numbers, local)


def test_rows_of_packed_data_and_of_scales_move_together():
    path, _ = mxfp4_checkpoint("T-GOS", **GOS)
    stored = read_tensors(path)
    w13 = load(path).weights.layers[2].moe.experts.w13
    blocks, scales = (stored[f"model.layers.2.mlp.experts.gate_up_proj_{kind}"] for kind in ("blocks", "scales"))
    assert tuple(blocks.shape) == (8, 192, 2, 16)
    for row in (0, 1, 95):
        for part in (0, 1):  # gate rows are even, up rows odd
            assert torch.equal(w13.data[5, part * 96 + row], blocks[5, 2 * row + part].flatten())
            assert torch.equal(w13.scales[5, part * 96 + row], scales[5, 2 * row + part])


@pytest.mark.parametrize("ranks", [1, 4])
def test_fp8_weights_load_as_they_are(ranks):
    path, numbers = fp8_checkpoint("T-DS3", BLOCK)
    for rank in range(ranks):
        report = load(path, ranks, rank)
        layer = report.weights.layers[1]
        assert layer.moe.experts.w13.sections == (32, 32) and layer.moe.experts.w13.scales.shape[1:] == (4, 2)
        assert {"layers.0.dense.w13", "layers.1.moe.shared.w2", "layers.1.latent.q_b", "layers.1.o"} <= quantised(
            report.weights
        )
        assert isinstance(layer.latent.kv_b_k, torch.Tensor) and isinstance(layer.moe.router, torch.Tensor)
        count = 16 // ranks
        assert_same_as_reference(plain(report.weights), numbers, range(rank * count, (rank + 1) * count))


def test_fp8_heads_are_fused_each_with_blocks_of_its_own():
    path, numbers = fp8_checkpoint("T-MM2", BLOCK)
    report = load(path)
    assert report.weights.layers[0].qkv.sections == (128, 64, 64)
    assert_same_as_reference(plain(report.weights), numbers)


def test_a_rank_reads_hardly_more_than_it_holds():
    gos, _ = mxfp4_checkpoint("T-GOS", hidden_size=256, intermediate_size=256)
    ds3, _ = fp8_checkpoint("T-DS3", (32, 32), hidden_size=256, moe_intermediate_size=256)
    for path in (gos, ds3):
        whole = load(path, dtype=torch.bfloat16)
        for rank in range(4):
            report = load(path, 4, rank, dtype=torch.float32)
            assert report.bytes_read <= 1.02 * report.bytes_held + 64 * 1024  # headers of a tiny model weigh much
            assert report.bytes_read < 0.6 * whole.bytes_read


def test_modules_that_are_not_converted_stay_plain():
    path, numbers = fp8_checkpoint("T-DS3", BLOCK)
    whole = read_tensors(numbers)
    kept = ("model.layers.2.", "model.layers.1.self_attn.")

    def unpack(tensors):
        rest = {n: t for n, t in tensors.items() if not (n.startswith(kept) and n.endswith("_scale_inv"))}
        return {n: whole[n] if n.startswith(kept) else t for n, t in rest.items()}

    rewrite_tensors(path, unpack)
    assert "model.layers.1.self_attn" in refusal(path) and "modules_to_not_convert" in refusal(path)
    config = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"}
    edit_config(
        path, quantization_config=config | {"modules_to_not_convert": ["model.layers.2", "model.layers.1.self_attn"]}
    )
    report = load(path)
    assert not [name for name in quantised(report.weights) if "layers.2" in name or "layers.1.o" in name]
    assert "layers.1.moe.experts.w2" in quantised(report.weights)
    assert_same_as_reference(plain(report.weights), numbers)


def test_parts_of_one_tensor_are_converted_together_or_not_at_all():
    path, _ = fp8_checkpoint("T-DS3", BLOCK)
    config = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "modules_to_not_convert": ["gate_proj"]}
    message = refusal(edit_config(path, quantization_config=config))
    assert "gate_proj" in message and "list both or neither" in message


def test_the_block_size_is_that_of_the_config_and_nothing_else():
    path, _ = fp8_checkpoint("T-DS3", BLOCK)
    for wrong in ([12, 40], [24, 16], [23, 40]):
        config = {"quant_method": "fp8", "weight_block_size": wrong}
        assert "shape" in refusal(edit_config(path, quantization_config=config))
    # [24, 32] gives all matrices as many scales as [24, 40] does: only config.json can tell them apart.
    config = {"quant_method": "fp8", "weight_block_size": [24, 32]}
    same_shapes = edit_config(path, quantization_config=config)
    w2 = load(same_shapes).weights.layers[1].moe.experts.w2
    assert w2.scheme.block == (24, 32)


@pytest.mark.parametrize(
    "name", ["layers.1.mlp.experts.3.up_proj", "layers.0.self_attn.kv_b_proj", "layers.0.self_attn.o_proj"]
)
def test_missing_scales_are_named(name):
    path, _ = fp8_checkpoint("T-DS3", BLOCK)
    missing = f"model.{name}.weight_scale_inv"
    rewrite_tensors(path, lambda tensors: {n: t for n, t in tensors.items() if n != missing})
    assert f"'{missing}'" in refusal(path)


def test_plain_weights_where_the_config_says_quantised_are_refused_and_the_other_way_round():
    path, numbers = mxfp4_checkpoint("T-GOS", **GOS)
    config = {"quant_method": "mxfp4", "modules_to_not_convert": GPT_OSS_KEPT}
    message = refusal(edit_config(numbers, quantization_config=config))
    assert "F32" in message and "modules_to_not_convert" in message
    message = refusal(edit_config(path, remove=["quantization_config"]))
    assert "U8" in message and "quantization_config" in message
    fp8, _ = fp8_checkpoint("T-DS3", BLOCK)
    assert "quantization_config" in refusal(edit_config(fp8, remove=["quantization_config"]))


def test_columns_that_no_whole_block_fits_are_refused():
    path, _ = mxfp4_checkpoint("T-GOS", **GOS)
    assert "blocks of 32" in refusal(edit_config(path, intermediate_size=80))


@pytest.mark.parametrize("kind", ["mxfp4", "fp8"])
def test_dummy_weights_are_quantised_too(kind):
    path = mxfp4_checkpoint("T-GOS", **GOS)[0] if kind == "mxfp4" else fp8_checkpoint("T-DS3", BLOCK)[0]
    real, report = load(path), load(path, dummy=True)
    shapes = [(name, tensor.shape, tensor.dtype) for name, tensor in real.weights.tensors()]
    assert shapes == [(name, tensor.shape, tensor.dtype) for name, tensor in report.weights.tensors()]
    parts = torch.cat(
        [load(path, 4, rank, dummy=True).weights.layers[1].moe.experts.w2.data.view(torch.uint8) for rank in range(4)]
    )
    assert torch.equal(parts, report.weights.layers[1].moe.experts.w2.data.view(torch.uint8))
    numbers = report.weights.layers[1].moe.experts.w2.dequantize(torch.float32)
    assert numbers.isfinite().all() and 0.01 < numbers.std() < 0.04


@pytest.mark.parametrize("block", [(16, 32), (24, 40)])
def test_stacked_fp8_experts_need_blocks_that_begin_where_projections_do(block):
    path, numbers = fp8_checkpoint("T-DS3", block)

    def stack(tensors):
        kept = {n: t for n, t in tensors.items() if ".mlp.experts." not in n}
        for layer in (1, 2, 3):
            prefix = f"model.layers.{layer}.mlp.experts."
            for kind, suffix in (("weight", ""), ("weight_scale_inv", "_scale_inv")):
                parts = [[tensors[f"{prefix}{e}.{p}_proj.{kind}"] for p in ("gate", "up", "down")] for e in range(16)]
                kept[f"{prefix}gate_up_proj{suffix}"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in parts])
                kept[f"{prefix}down_proj{suffix}"] = torch.stack([down for _, _, down in parts])
        return kept

    rewrite_tensors(path, stack)
    if block == (16, 32):
        assert_same_as_reference(plain(load(path).weights), numbers)
    else:
        assert "do not divide" in refusal(path)


@pytest.mark.parametrize("name", ["weight", "weight_scale_inv"])
def test_other_shapes_of_latent_keys_and_values_are_refused(name):
    path, _ = fp8_checkpoint("T-DS3", BLOCK)
    key = f"model.layers.1.self_attn.kv_b_proj.{name}"
    rewrite_tensors(path, lambda tensors: tensors | {key: tensors[key].flatten()})
    assert f"'{key}' has shape" in refusal(path)
