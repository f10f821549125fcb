"""KV storage: what is written is read back from its slot, nothing else changes, and sizes are exact."""

from __future__ import annotations

import psutil
import pytest
import torch

from moewe.kvcache import CacheGroup, KVStorage
from moewe.quant import FORMATS
from tests.support.numerics import assert_same


def group(layers: tuple[int, ...], *, name: str = "full", kind: str = "full", dtype: str = "bfloat16") -> CacheGroup:
    return CacheGroup(
        name=name, kind=kind, layers=layers, num_kv_heads=2, head_dim=8, value_dim=8, number_format=FORMATS[dtype]
    )


def test_sizes_are_exact() -> None:
    groups = [group((0, 2)), group((1,), name="other", dtype="float32")]
    storage = KVStorage(groups, num_blocks=5, block_size=4)
    assert storage.num_bytes == sum(5 * g.bytes_per_block(4) for g in groups)
    assert [storage.bytes_per_token(layer) for layer in (0, 1, 2)] == [2 * 2 * 8 * 2, 2 * 2 * 8 * 4, 2 * 2 * 8 * 2]
    for layer, dtype in ((0, torch.bfloat16), (1, torch.float32)):
        for tensor in storage.layer(layer):
            assert tensor.shape == (5, 4, 2, 8)
            assert_same(tensor, torch.zeros(5, 4, 2, 8, dtype=dtype))


def test_write_fills_its_slots_and_nothing_else() -> None:
    storage = KVStorage([group((0, 1), dtype="float32")], num_blocks=4, block_size=4)
    k, v = torch.randn(2, 3, 2, 8)
    slots = torch.tensor([13, 2, 3])
    storage.write(1, k, v, slots)
    for tensor, rows in zip(storage.layer(1), (k, v)):
        expected = torch.zeros(16, 2, 8)
        expected[slots] = rows
        assert_same(tensor.reshape(16, 2, 8), expected)
    assert all(not tensor.any() for tensor in storage.layer(0))


def test_write_takes_strided_rows() -> None:
    storage = KVStorage([group((0,), dtype="float32")], num_blocks=2, block_size=4)
    packed = torch.randn(3, 6, 8)  # q, k and v side by side
    storage.write(0, packed[:, 2:4], packed[:, 4:], torch.tensor([0, 1, 2]))
    assert_same(storage.layer(0)[0][0, :3], packed[:, 2:4].contiguous())
    assert_same(storage.layer(0)[1][0, :3], packed[:, 4:].contiguous())


def test_write_of_no_rows_changes_nothing() -> None:
    storage = KVStorage([group((0,))], num_blocks=2, block_size=4)
    none = torch.empty(0, 2, 8, dtype=torch.bfloat16)
    storage.write(0, none, none, torch.empty(0, dtype=torch.int64))
    assert not storage.layer(0)[0].any()


def test_zero_blocks_clears_every_layer() -> None:
    storage = KVStorage([group((0, 1))], num_blocks=4, block_size=4)
    for layer in (0, 1):
        for tensor in storage.layer(layer):
            tensor.fill_(torch.nan)
    storage.zero_blocks([1, 3])
    for layer in (0, 1):
        for tensor in storage.layer(layer):
            assert [bool(block.isnan().any()) for block in tensor] == [True, False, True, False]


def test_a_pool_takes_memory_only_where_it_is_written() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    storage = KVStorage([group(tuple(range(32)))], num_blocks=1 << 16, block_size=16)
    assert storage.num_bytes == 2 << 30
    row = torch.ones(1, 2, 8, dtype=torch.bfloat16)
    storage.write(31, row, row, torch.tensor([(1 << 20) - 1]))
    assert storage.layer(31)[0][-1, -1].all()
    assert process.memory_info().rss - before < 64 << 20


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([group((0,), kind="latent")], "kind 'latent'; this version stores only 'full'"),
        ([group((0, 1)), group((1,), name="again")], "layer 1 is in cache group 'again' and in another"),
    ],
)
def test_groups_that_cannot_be_stored_are_refused(groups: list[CacheGroup], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVStorage(groups, num_blocks=1, block_size=4)
