"""Tensors in huge pages: aligned, apart from each other, and given back."""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path

import pytest
import torch

from moewe.quant.memory import empty_lasting, empty_matrix

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is the C library's memory")
HUGE = 2 << 20


@pytest.mark.parametrize("shape", [(0,), (3, 5), (1024, 512), (3, 1000, 701)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.int8], ids=str)
def test_shape_dtype_and_alignment(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    own, lasting = empty_matrix(shape, dtype), empty_lasting(shape, dtype)
    for tensor in (own, lasting):
        assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(1)
    assert own.nbytes < 1 << 20 or own.data_ptr() % HUGE == 0


def test_lasting_tensors_share_no_byte() -> None:
    tensors = [empty_lasting((number * 1000 + 1,), torch.uint8) for number in range(200)]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(tensors))


def test_ranks_in_threads_share_no_byte() -> None:
    found: dict[int, list[torch.Tensor]] = {}

    def rank(number: int) -> None:
        found[number] = [empty_lasting((10_000,), torch.uint8).fill_(number) for _ in range(100)]

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(bool((t == number).all()) for number, tensors in found.items() for t in tensors)


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split(maxsplit=1)[0].split("-"))
        if begin <= address < end:
            return True
    return False


def test_memory_goes_back_with_its_tensor() -> None:
    tensor = empty_matrix((64 << 20,), torch.uint8).fill_(1)
    view, address = tensor[:10], tensor.data_ptr() + (32 << 20)
    del tensor
    gc.collect()
    assert is_mapped(address) and int(view.sum()) == 10
    del view
    gc.collect()
    assert not is_mapped(address)
