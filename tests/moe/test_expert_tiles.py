"""The choice of tiles for products of experts on GPUs: pure, and right about how many tiles there can be."""

from __future__ import annotations

import itertools

import pytest

from moewe.moe.kernels.expert_tiles import ProductSize, most_tiles, pick_config
from moewe.native.gpu import TARGETS

QWEN = (1536 // 2, 2048)  # outputs (gates) and inputs of an expert of Qwen3-30B-A3B


def size(rows: int, *, slots: int = 128, bits: int = 16, scale_columns: int = 0, gated: bool = True) -> ProductSize:
    return ProductSize(
        rows=rows, slots=slots, outputs=QWEN[0], inputs=QWEN[1], gated=gated, bits=bits, scale_columns=scale_columns
    )


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_tiles_fit_shared_memory(target, bits):
    for rows, gated in itertools.product((8, 128, 2048, 65536), (False, True)):
        config = pick_config(size(rows, bits=bits, gated=gated), target)
        width = config.block_n * (2 if gated else 1)
        stage = config.block_k * (width * bits // 8 + config.block_m * 2)
        programs = 1 if config.persistent else 2
        assert programs * config.num_stages * stage <= target.shared_bytes, (rows, gated, config)


def test_few_rows_stream_and_many_are_walked():
    h200 = TARGETS[90]
    decode, prefill = pick_config(size(8), h200), pick_config(size(65536), h200)
    assert not decode.persistent and decode.block_m == 16
    assert 8 * -(-QWEN[0] // decode.block_n) >= h200.num_sms  # eight active experts keep every multiprocessor busy
    assert prefill.persistent and prefill.block_m == 128


def test_a_step_along_the_inputs_has_one_scale():
    for rows in (8, 65536):
        assert pick_config(size(rows, bits=8, scale_columns=32), TARGETS[90]).block_k == 32


def test_an_invariant_choice_does_not_depend_on_rows():
    for bits in (4, 8, 16):
        found = {pick_config(size(rows, bits=bits), TARGETS[90], batch_invariant=True) for rows in (1, 300, 10**6)}
        assert len(found) == 1


@pytest.mark.parametrize("block_m", [1, 4, 16])
def test_no_distribution_of_rows_has_more_tiles(block_m):
    for rows, slots in ((9, 4), (3, 8), (16, 1), (40, 3)):
        worst = max(sum(-(-count // block_m) for count in counts) for counts in _distributions(rows, slots))
        assert worst <= most_tiles(rows, slots, block_m) <= worst + 1


def _distributions(rows, slots):
    if slots == 1:
        yield (rows,)
        return
    for first in range(rows + 1):
        if slots <= 4:
            yield from ((first, *rest) for rest in _distributions(rows - first, slots - 1))
    if slots > 4:
        yield tuple(1 if slot < rows else 0 for slot in range(slots))


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_tiles_of_fp32_are_short_enough_for_registers(batch_invariant: bool) -> None:
    for rows in (1, 300, 10**6):
        assert pick_config(size(rows, bits=32), TARGETS[80], batch_invariant=batch_invariant).block_k == 16
