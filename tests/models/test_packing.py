"""Packing after loading: the same numbers in tiles, in the same memory; what is not for native kernels is untouched."""

import psutil
import pytest
import torch

from moewe.models.families import load_config
from moewe.models.loading import LoadOptions, load_weights
from moewe.models.packing import pack_weights, packable_bytes
from moewe.models.weights import ModelWeights, bytes_by_kind
from moewe.moe.gated import ExpertWeights
from moewe.quant import FP8_BLOCK, MXFP4_SCHEME, PackedTensor, QuantScheme, QuantTensor, empty_matrix
from moewe.quant.formats import torch_dtype
from moewe.quant.packed import can_pack
from moewe.quant.scheme import DATA_TYPES, SCALE_TYPES
from tests.support.fixtures import FIXTURES, checkpoint
from tests.support.native import needs_native
from tests.support.numerics import assert_same
from tests.support.quantised import fp8_checkpoint, mxfp4_checkpoint

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


QUANTISED = {
    "mxfp4": lambda: mxfp4_checkpoint("T-GOS")[0],
    "fp8": lambda: fp8_checkpoint("T-DS3", (128, 128))[0],
    "fp8 in small blocks": lambda: fp8_checkpoint("T-MM2", (24, 40))[0],
}


@pytest.mark.parametrize("name", QUANTISED)
def test_codes_of_quantised_checkpoints_are_packed_as_stored(name):
    path = QUANTISED[name]()
    plain, report = load(path), load(path, pack=True)
    expected = {place: value for place, _, value in walk(plain.weights)}
    kinds = set()
    for place, field, held in walk(report.weights):
        stored = expected.pop(place)
        if isinstance(stored, QuantTensor):
            assert isinstance(held, PackedTensor) and held.format == stored.scheme.kind, place
            assert held.gate_up == (field == "w13")
            assert_same(held.dequantize(torch.float32), stored.dequantize(torch.float32))
            kinds.add(field)
    assert not expected and {"w13", "w2"} <= kinds
    assert report.bytes_held == report.weights.num_bytes == sum(bytes_by_kind(report.weights).values())


def test_experts_of_two_kinds_stay_with_torch():
    """One call runs both products, so that they are packed together or not at all."""
    path, _ = mxfp4_checkpoint("T-GOS", intermediate_size=64)
    weights = load(path).weights
    experts = weights.layers[0].moe.experts
    experts.w2 = experts.w2.dequantize(torch.bfloat16)
    pack_weights(weights, lambda num_bytes: None)
    assert isinstance(experts.w2, torch.Tensor) and isinstance(experts.w13, QuantTensor)


@pytest.mark.parametrize("kind", ["bf16", "mxfp4"])
def test_whole_tiles_are_packed_where_they_lie(kind):
    path = checkpoint("T-MIX") if kind == "bf16" else mxfp4_checkpoint("T-GOS")[0]  # widths of 64 and 96
    weights = load(path).weights
    before = {place: getattr(value, "data", value).data_ptr() for place, _, value in walk(weights)}
    bytes_before = weights.num_bytes
    packed = packable_bytes(weights)
    told = []
    pack_weights(weights, told.append)
    assert sum(told) == packed and packable_bytes(weights) == 0
    where = {place: v.data.data_ptr() for place, _, v in walk(weights) if isinstance(v, PackedTensor)}
    assert where and all(before[place] == address for place, address in where.items())
    assert weights.num_bytes == bytes_before


@pytest.mark.parametrize(
    ("kind", "ffn_width"),
    [("bf16", 256), ("bf16", 250), ("mxfp4", 1024), ("fp8_block", 512), ("fp8_block", 506)],
    ids=lambda value: str(value),
)
def test_packing_holds_no_second_copy_of_the_model(kind, ffn_width):
    """Sixteen layers, in place or padded; with a copy of all, memory would grow by the 100 MiB that they take."""

    def memory(shape, dtype):
        return empty_matrix(shape, dtype).view(torch.uint8).fill_(1).view(dtype).view(*shape)  # as a loader holds it

    def stack(*shape, sections=1):
        if kind == "bf16":
            return memory(shape, torch.bfloat16)
        scheme = MXFP4_SCHEME if kind == "mxfp4" else QuantScheme(kind=FP8_BLOCK, block=(128, 128))
        parts = (shape[1] // sections,) * sections
        data = memory((shape[0], *scheme.data_shape(*shape[1:])), torch_dtype(DATA_TYPES[kind]))
        rows, columns = scheme.scales_shape(parts[0], shape[2])
        scales = memory((shape[0], rows * sections, columns), torch_dtype(SCALE_TYPES[kind]))
        return QuantTensor(data=data, scales=scales, scheme=scheme, shape=shape, sections=parts)

    class Layer:
        qkv = o = latent = dense = None

        def __init__(self):
            w13, w2 = stack(8, 2 * ffn_width, 1024, sections=2), stack(8, 1024, ffn_width)
            self.moe = type("Moe", (), {"experts": ExpertWeights(w13=w13, w2=w2), "shared": None})

    end = memory((1, 1), torch.bfloat16)
    weights = ModelWeights(embedding=end, head=end.clone(), final_norm=end[0], layers=[])
    weights.layers = [Layer() for _ in range(16)]
    process, seen = psutil.Process(), []
    before = process.memory_info().rss
    pack_weights(weights, lambda num_bytes: seen.append(process.memory_info().rss))
    assert len(seen) == 33 and all(isinstance(layer.moe.experts.w2, PackedTensor) for layer in weights.layers)
    assert max(seen) - before < 64 << 20


def test_only_bf16_on_a_cpu_is_packed():
    cpu = torch.device("cpu")
    assert can_pack(torch.bfloat16, cpu)
    assert not can_pack(torch.float32, cpu) and not can_pack(torch.float16, cpu)
    assert not can_pack(torch.bfloat16, torch.device("cuda"))
