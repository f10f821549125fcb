"""Loading with `quantization`: the matrices that are meant become int8 or int4, with a layer held twice at most."""

from __future__ import annotations

from dataclasses import replace

import psutil
import pytest
import torch

from moewe.models.config import ConfigError
from moewe.models.families import load_config
from moewe.models.footprint import model_footprint
from moewe.models.loading import LoadOptions, LoadReport, load_weights
from moewe.models.weights import bytes_by_kind
from moewe.moe.wide_ep.placement import linear_placement
from moewe.quant import PackedTensor, WeightScheme, down_scheme, head_scheme, weight_scheme
from moewe.quant.quantize import quantize
from tests.support.fixtures import FIXTURES, checkpoint
from tests.support.native import needs_native
from tests.support.numerics import assert_same
from tests.support.quantised import fp8_checkpoint, mxfp4_checkpoint

pytestmark = needs_native
SCHEMES = [weight_scheme("int8"), weight_scheme("int4")]
schemes = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.kind)
of_families = pytest.mark.parametrize(  # turn by turn: what is quantised does not depend on the scheme
    ("name", "scheme"),
    [pytest.param(name, SCHEMES[i % 2], id=f"{name}-{SCHEMES[i % 2].kind}") for i, name in enumerate(FIXTURES)],
)


def load(path, **options) -> LoadReport:
    return load_weights(path, load_config(path), LoadOptions(dtype=torch.bfloat16, **options))


def walk(node, path=""):
    for name, value in vars(node).items():
        for i, child in enumerate(value if isinstance(value, list) else [value]):
            here = f"{path}.{name}.{i}"
            if isinstance(child, torch.Tensor | PackedTensor):
                yield here, name, child
            elif hasattr(child, "__dict__"):
                yield from walk(child, here)


@of_families
def test_the_matrices_that_are_multiplied_are_quantised(name: str, scheme: WeightScheme) -> None:
    path = checkpoint(name)
    plain, report = load(path), load(path, pack=True, scheme=scheme)
    expected = {place: value for place, _, value in walk(plain.weights)}
    quantised = set()
    for place, field, held in walk(report.weights):
        original = expected.pop(place)
        if field in ("kv_b_k", "kv_b_v"):
            assert held.format == "bf16"
            numbers = held.dequantize(torch.bfloat16)
            assert_same(numbers.transpose(1, 2) if field == "kv_b_k" else numbers, original)
        elif isinstance(held, PackedTensor):
            quantised.add(field)
            own = head_scheme() if field == "head" else scheme
            if field == "w2" and ".experts." not in place:
                own = down_scheme(scheme)
            again = quantize(original, own, gate_up=field == "w13")
            assert held.format == own.kind
            assert_same(held.dequantize(torch.float32), again.dequantize(torch.float32))
        else:
            assert_same(held, original)
    assert not expected
    assert {"o", "w13", "w2", "head"} <= quantised <= {"qkv", "o", "q", "q_a", "q_b", "kv_a", "w13", "w2", "head"}
    assert isinstance(report.weights.embedding, torch.Tensor), "its rows stay as stored"
    assert report.bytes_held == report.weights.num_bytes
    assert report.bytes_read == plain.bytes_read


@of_families
def test_the_footprint_is_what_is_held(name: str, scheme: WeightScheme) -> None:
    path = checkpoint(name)
    config = load_config(path)
    footprint = model_footprint(config, name=name, dtype="bfloat16", scheme=scheme)
    report = load(path, pack=True, scheme=scheme)
    # Parts of a fused matrix are padded one by one in the footprint, and together where they are held.
    assert report.bytes_held <= footprint.total_bytes <= 1.1 * report.bytes_held
    kinds = bytes_by_kind(report.weights)
    assert sum(kinds.values()) == report.bytes_held
    assert kinds["head/int8"] == head_scheme().num_bytes(config.vocab_size, config.hidden_size)
    assert footprint.head_bytes == sum(n for kind, n in kinds.items() if kind.startswith("head/"))
    assert f"attention/{scheme.kind}" in kinds and kinds["embedding/bfloat16"] == footprint.embedding_bytes


@schemes
def test_a_rank_quantises_its_experts_as_all_do(scheme: WeightScheme) -> None:
    path = checkpoint("T-MIX")
    config = load_config(path)
    num_experts = config.moe.routing.num_experts
    placement = linear_placement(len(config.moe_layers), num_experts, 2)
    whole = load(path, pack=True, scheme=scheme).weights.layers[0].moe.experts
    for rank in range(2):
        own = load(path, pack=True, scheme=scheme, placement=placement, rank=rank).weights.layers[0].moe.experts
        for slot, expert in enumerate(placement.local_experts(rank, 0).tolist()):
            for name in ("w13", "w2"):
                held, all_of_them = getattr(own, name), getattr(whole, name)
                assert_same(
                    held.select(slot).dequantize(torch.float32), all_of_them.select(expert).dequantize(torch.float32)
                )


@pytest.mark.parametrize("dummy", [False, True])
def test_progress_counts_reading_and_quantising(dummy: bool) -> None:
    path, told = checkpoint("T-DS3"), []
    options = LoadOptions(dtype=torch.bfloat16, pack=True, dummy=dummy, scheme=SCHEMES[0])
    load_weights(path, load_config(path), options, on_progress=lambda done, total: told.append((done, total)))
    done, totals = zip(*told)
    assert set(totals) == {totals[0]} and list(done) == sorted(set(done)) and (done[0], done[-1]) == (0, totals[0])


@schemes
def test_dummy_weights_are_those_of_bf16_quantised(scheme: WeightScheme) -> None:
    path = checkpoint("T-MIX")
    plain = load(path, dummy=True, seed=3).weights.layers[1].moe.experts.w2
    held = load(path, dummy=True, seed=3, pack=True, scheme=scheme).weights.layers[1].moe.experts.w2
    assert_same(held.dequantize(torch.float32), quantize(plain, scheme).dequantize(torch.float32))


def test_a_quantised_checkpoint_is_refused() -> None:
    for path, kind in (
        (mxfp4_checkpoint("T-GOS", intermediate_size=64)[0], "mxfp4"),
        (fp8_checkpoint("T-DS3", (24, 40))[0], "fp8_block"),
    ):
        with pytest.raises(ConfigError, match=rf"quantization=int4: the checkpoint is quantised already \({kind}\)"):
            load(path, pack=True, scheme=SCHEMES[1])


def test_no_more_than_a_layer_is_held_as_stored() -> None:
    path = checkpoint("T-MIX")
    config = load_config(path)
    config = replace(config, moe=replace(config.moe, expert_width=49152))
    options = LoadOptions(dtype=torch.bfloat16, pack=True, dummy=True, scheme=SCHEMES[1], num_threads=1)
    process, seen = psutil.Process(), []
    before = process.memory_info().rss
    report = load_weights(path, config, options, on_progress=lambda *_: seen.append(process.memory_info().rss))
    plain = model_footprint(config, name="", dtype="bfloat16")
    layer, noise = plain.expert_bytes * plain.num_experts, 64 << 20
    most = report.bytes_held + 1.1 * layer + noise
    assert plain.routed_bytes + report.bytes_held > most, "the test is large enough to tell"
    assert max(seen) - before < most
