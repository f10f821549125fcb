"""Packing after loading: the same numbers in tiles, in the same memory; what is not for native kernels is untouched."""

import psutil
import pytest
import torch

from moewe.models.families import load_config
from moewe.models.loading import LoadOptions, load_weights
from moewe.models.packing import pack_weights, packable_bytes
from moewe.models.weights import ModelWeights
from moewe.moe.gated import ExpertWeights
from moewe.quant import PackedTensor, QuantTensor, empty_matrix
from moewe.quant.packed import can_pack
from tests.support.fixtures import FIXTURES, checkpoint
from tests.support.native import needs_native
from tests.support.numerics import assert_same
from tests.support.quantised import mxfp4_checkpoint

pytestmark = needs_native
UNPACKED = {"b13", "b2", "embedding", "router", "shared_gate"}


def load(path, **options):
    return load_weights(path, load_config(path), LoadOptions(dtype=torch.bfloat16, **options))


def walk(node, path=""):
    for name, value in vars(node).items():
        for i, child in enumerate(value if isinstance(value, list) else [value]):
            here = f"{path}.{name}.{i}"
            if isinstance(child, torch.Tensor | PackedTensor | QuantTensor):
                yield here, name, child
            elif hasattr(child, "__dict__"):
                yield from walk(child, here)


@pytest.mark.parametrize("name", FIXTURES)
def test_packed_weights_are_those_that_were_loaded(name):
    path = checkpoint(name)
    plain, report = load(path), load(path, pack=True)
    expected = {place: value for place, _, value in walk(plain.weights)}
    for place, field, held in walk(report.weights):
        matrix = held.ndim >= 2 if isinstance(held, torch.Tensor) else True
        tied = plain.weights.head is plain.weights.embedding and field == "embedding"
        assert isinstance(held, PackedTensor) == (matrix and (field not in UNPACKED or tied)), place
        numbers = held.dequantize(torch.bfloat16) if isinstance(held, PackedTensor) else held
        turned = field == "kv_b_k"  # queries are multiplied with it from the other side
        assert_same(numbers.transpose(1, 2) if turned else numbers, expected.pop(place))
    assert not expected
    assert (report.weights.head is report.weights.embedding) == (plain.weights.head is plain.weights.embedding)
    held_once = {id(t): t.nbytes for _, t in report.weights.tensors()}
    assert report.bytes_held == report.weights.num_bytes == sum(held_once.values())


@pytest.mark.parametrize("dummy", [False, True])
def test_packing_is_part_of_the_progress(dummy):
    path, told = checkpoint("T-DS3"), []
    options = LoadOptions(dtype=torch.bfloat16, pack=True, dummy=dummy)
    load_weights(path, load_config(path), options, on_progress=lambda done, total: told.append((done, total)))
    done, totals = zip(*told)
    plain = load(path)
    first = plain.weights.num_bytes if dummy else plain.bytes_read
    assert done[0] == 0 and list(done) == sorted(set(done)) and done[-1] == totals[-1]
    assert set(totals) == {totals[0]} and packable_bytes(plain.weights) < totals[0]
    assert totals[0] - packable_bytes(plain.weights) == pytest.approx(first, rel=0.2)  # headers are not told


def test_quantised_matrices_stay_as_stored():
    path, _ = mxfp4_checkpoint("T-GOS", intermediate_size=64)
    weights = load(path, pack=True).weights
    for layer in weights.layers:
        assert isinstance(layer.qkv, PackedTensor) and isinstance(layer.moe.experts.w13, QuantTensor)


def test_experts_of_two_kinds_stay_with_torch():
    """One call runs both products, so that they are packed together or not at all."""
    path, _ = mxfp4_checkpoint("T-GOS", intermediate_size=64)
    weights = load(path).weights
    experts = weights.layers[0].moe.experts
    experts.w2 = experts.w2.dequantize(torch.bfloat16)
    pack_weights(weights, lambda num_bytes: None)
    assert isinstance(experts.w2, torch.Tensor) and isinstance(experts.w13, QuantTensor)


def test_whole_tiles_are_packed_where_they_lie():
    path = checkpoint("T-MIX")  # widths of 64 and 96
    weights = load(path).weights
    before = {place: value.data_ptr() for place, _, value in walk(weights)}
    bytes_before = weights.num_bytes
    packed = packable_bytes(weights)
    told = []
    pack_weights(weights, told.append)
    assert sum(told) == packed and packable_bytes(weights) == 0
    where = {place: v.data.data_ptr() for place, _, v in walk(weights) if isinstance(v, PackedTensor)}
    assert where and all(before[place] == address for place, address in where.items())
    assert weights.num_bytes == bytes_before


@pytest.mark.parametrize("ffn_width", [256, 250], ids=["in_place", "padded"])
def test_packing_holds_no_second_copy_of_the_model(ffn_width):
    """Sixteen stacks of 12 MiB; with a copy of all, memory would grow by as much as they take."""

    def stack(*shape):
        return empty_matrix(shape, torch.bfloat16).fill_(1)  # as a loader holds it

    class Layer:
        qkv = o = latent = dense = None

        def __init__(self):
            w13, w2 = stack(8, 2 * ffn_width, 1024), stack(8, 1024, ffn_width)
            self.moe = type("Moe", (), {"experts": ExpertWeights(w13=w13, w2=w2), "shared": None})

    weights = ModelWeights(embedding=stack(1, 1), head=stack(1, 1), final_norm=stack(1), layers=[])
    weights.layers = [Layer() for _ in range(16)]
    process, seen = psutil.Process(), []
    before = process.memory_info().rss
    pack_weights(weights, lambda num_bytes: seen.append(process.memory_info().rss))
    assert len(seen) == 33
    assert max(seen) - before < 64 << 20


def test_only_bf16_on_a_cpu_is_packed():
    cpu = torch.device("cpu")
    assert can_pack(torch.bfloat16, cpu)
    assert not can_pack(torch.float32, cpu) and not can_pack(torch.float16, cpu)
    assert not can_pack(torch.bfloat16, torch.device("cuda"))
