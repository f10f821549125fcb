"""Memory that shows when a kernel reads what nobody wrote, or writes where it must not.

Not a kernel and no expectations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from .numerics import assert_same

_MARGIN = 64  # elements; a multiple of 16 bytes for every type


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Let torch fill what it allocates empty: NaN, or the largest whole number."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    # Not torch.use_deterministic_algorithms, which imports torch's compiler: seconds.
    before = torch._C._get_deterministic_algorithms()
    torch._C._set_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before)


def fenced(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of `tensor` with poison before and behind it in the same memory, a wrong row behind the last."""
    poison = torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
    dtype = torch.uint8 if tensor.element_size() == 1 else tensor.dtype
    fill = 0x7F if tensor.element_size() == 1 else poison  # NaN in e4m3
    around = torch.full((tensor.numel() + 2 * _MARGIN,), fill, dtype=dtype)
    inner = around[_MARGIN : _MARGIN + tensor.numel()].view(tensor.dtype).view(tensor.shape)
    return inner.copy_(tensor)


def assert_untouched(call: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """Return `call(*fenced copies)`; assert that the call left the memory of its inputs and around them as it was."""
    inside = [fenced(tensor) for tensor in tensors]
    before = [_memory(tensor).clone() for tensor in inside]
    result = call(*inside)
    for tensor, was in zip(inside, before):
        assert_same(_memory(tensor), was)
    return result


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
