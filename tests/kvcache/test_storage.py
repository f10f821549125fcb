"""KV storage: what is written is read back from its slot, nothing else changes, and sizes are exact."""

from __future__ import annotations

import psutil
import pytest
import torch

from moewe.kvcache import CacheGroup
from moewe.kvcache.storage import KVStorage
from moewe.quant import FORMATS
from tests.support.numerics import assert_same


def group(layers: tuple[int, ...], *, name: str = "full", dtype: str = "bfloat16", value_dim: int = 8) -> CacheGroup:
    return CacheGroup(
        name=name,
        kind="full",
        layers=layers,
        num_kv_heads=2,
        head_dim=8,
        value_dim=value_dim,
        number_format=FORMATS[dtype],
    )


def latent(layers: tuple[int, ...], *, value_dim: int = 5) -> CacheGroup:
    return CacheGroup(
        name="latent",
        kind="latent",
        layers=layers,
        num_kv_heads=1,
        head_dim=8,
        value_dim=value_dim,
        number_format=FORMATS["float32"],
    )


def test_sizes_are_exact() -> None:
    groups = [group((0, 2)), group((1,), name="other", dtype="float32")]
    storage = KVStorage(groups, num_blocks=5, block_size=4)
    assert storage.num_bytes == sum(5 * 4 * g.bytes_per_token() for g in groups)
    assert [g.bytes_per_token() for g in groups] == [2 * 2 * 2 * 8 * 2, 2 * 2 * 8 * 4]
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


def test_keys_and_values_may_differ_in_width_and_groups_in_blocks() -> None:
    groups = [group((1,), dtype="float32", value_dim=12), group((0, 2), name="other", dtype="float32")]
    storage = KVStorage(groups, num_blocks=(3, 5), block_size=4)
    assert storage.num_blocks == (3, 5)
    assert [storage.group_of(layer) for layer in (0, 1, 2)] == [1, 0, 1]
    assert storage.num_bytes == 4 * (3 * groups[0].bytes_per_token() + 5 * groups[1].bytes_per_token())
    assert [tuple(tensor.shape) for tensor in storage.layer(1)] == [(3, 4, 2, 8), (3, 4, 2, 12)]
    assert groups[0].bytes_per_token() == 2 * (8 + 12) * 4
    k, v = torch.randn(1, 2, 8), torch.randn(1, 2, 12)
    storage.write(1, k, v, torch.tensor([11]))
    assert_same(storage.layer(1)[0][2, 3], k[0])
    assert_same(storage.layer(1)[1][2, 3], v[0])


def test_values_of_a_latent_layer_are_the_first_elements_of_its_keys() -> None:
    storage = KVStorage([latent((0, 1))], num_blocks=2, block_size=4)
    assert storage.num_bytes == 2 * 2 * 4 * 8 * 4
    assert storage.groups[0].bytes_per_token() == 2 * 8 * 4
    rows = torch.randn(2, 1, 8)
    storage.write(1, rows, None, torch.tensor([6, 1]))
    k, v = storage.layer(1)
    assert (k.shape, v.shape) == ((2, 4, 1, 8), (2, 4, 1, 5))
    assert_same(k.flatten(0, 1)[[6, 1]], rows)
    assert_same(v.flatten(0, 1)[[6, 1]], rows[..., :5].contiguous())
    assert v.data_ptr() == k.data_ptr()
    assert not storage.layer(0)[0].any()


def test_values_go_only_with_layers_that_store_them() -> None:
    storage = KVStorage([latent((0,)), group((1,), dtype="float32")], num_blocks=2, block_size=4)
    with pytest.raises(AssertionError):
        storage.write(0, torch.ones(1, 1, 8), torch.ones(1, 1, 5), torch.tensor([0]))
    with pytest.raises(AssertionError):
        storage.write(1, torch.ones(1, 2, 8), None, torch.tensor([0]))
    assert not any(tensor.any() for layer in (0, 1) for tensor in storage.layer(layer))


def test_zero_blocks_clears_one_group() -> None:
    storage = KVStorage([group((0,), value_dim=4), latent((1,))], num_blocks=(4, 3), block_size=4)
    for layer in (0, 1):
        storage.layer(layer)[0].fill_(torch.nan)
        storage.layer(layer)[1].fill_(torch.nan)
    storage.zero_blocks([2], 1)
    storage.zero_blocks(torch.tensor([0, 3]), 0)
    for tensor in storage.layer(0):
        assert [bool(block.isnan().any()) for block in tensor] == [False, True, True, False]
    for tensor in storage.layer(1):
        assert [bool(block.isnan().any()) for block in tensor] == [True, True, False]


def test_a_number_of_blocks_is_needed_for_every_group() -> None:
    with pytest.raises(ValueError, match="1 numbers of blocks for 2 cache groups"):
        KVStorage([group((0,)), group((1,), name="other")], num_blocks=[3], block_size=4)


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
        ([latent((0,), value_dim=9)], "value_dim=9, but its values are the first elements of keys of head_dim=8"),
        ([group((0, 1)), group((1,), name="again")], "layer 1 is in cache group 'again' and in another"),
    ],
)
def test_groups_that_cannot_be_stored_are_refused(groups: list[CacheGroup], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVStorage(groups, num_blocks=1, block_size=4)


def test_what_was_never_written_takes_no_memory() -> None:
    storage = KVStorage([group((0, 1))], num_blocks=2048, block_size=16)
    assert storage.block_bytes(0) == 2 * 2 * 16 * 2 * 8 * 2 and storage.num_bytes == 2048 * storage.block_bytes(0)
    assert storage.resident_bytes() == 0
    storage.write(0, torch.ones(1, 2, 8), torch.ones(1, 2, 8), torch.tensor([5]))
    assert 0 < storage.resident_bytes() <= 2 * (2 << 20), (
        "a page of keys and one of values, huge ones where there are any"
    )
