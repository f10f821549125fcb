"""Memory that NCCL has registered: collectives of fixed shapes send from it and receive into it without copies.

Not a link (links.py uses one) and not a process group. NCCL asks that in a collective either every rank hands over
registered memory or none does (User Buffer Registration, NCCL user guide), so ranks agree before they use any, and only
collectives whose shapes are the same on all ranks get some. A rank that cannot register works without: a line says why.
Units: bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

log = logging.getLogger(__name__)

_ALIGNMENT = 512


class RegisteringBackend(Protocol):
    """What is asked of the back end of a process group (torch's for NCCL has it)."""

    @property
    def mem_allocator(self) -> Any:
        """Allocates memory that can be registered."""
        ...

    def register_mem_pool(self, pool: Any) -> None:
        """Register all memory of a pool."""
        ...


class RegisteredRoom:
    """Buffers by kind, each made when it is first asked for and kept: a CUDA graph holds their addresses.

    What a collective gets depends on its kind, its turn and its size, not on those before it: ranks that run a step
    with a graph and without hand over the same buffers.

    Args:
        allocate: returns so many bytes of registered memory, [n] u8.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor]) -> None:
        self._allocate = allocate
        self._buffers: dict[tuple[str, int, int], torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """All that was allocated."""
        return sum(buffer.numel() for buffer in self._buffers.values())

    def take(self, kind: str, turn: int, num_rows: int, row_bytes: int) -> torch.Tensor:
        """Return [num_rows, row_bytes] u8 to write to, which hold until the same kind and turn is asked for again.

        Args:
            kind: of the collective, and of its end.
            turn: a number that no other collective of the same kind which is under way has.
            num_rows, row_bytes: of what travels.
        """
        wanted = num_rows * row_bytes
        size = max(_ALIGNMENT, 1 << (wanted - 1).bit_length())
        found = self._buffers.get((kind, turn, size))
        if found is None:
            found = self._buffers[kind, turn, size] = self._allocate(size)
        return found[:wanted].view(num_rows, row_bytes)


def open_room(
    backend: RegisteringBackend,
    device: torch.device,
    agree: Callable[[bool], bool],
    *,
    make_pool: Callable[[Any], Any] | None = None,
    use_pool: Callable[[Any], AbstractContextManager[Any]] | None = None,
) -> RegisteredRoom | None:
    """Return a room in memory of `device`; None, on all ranks, where one of them cannot register any.

    A collective of all ranks of the group.

    Args:
        backend: of the process group.
        device: of this rank.
        agree: tells all ranks of a group whether this one could, and returns whether all could.
        make_pool, use_pool: of torch, unless a test brings its own.
    """
    make_pool, use_pool = make_pool or torch.cuda.MemPool, use_pool or torch.cuda.use_mem_pool
    pools = []

    def allocate(num_bytes: int) -> torch.Tensor:
        pool = make_pool(backend.mem_allocator)
        with use_pool(pool):
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        backend.register_mem_pool(pool)
        pools.append(pool)  # a pool that is forgotten gives its memory back
        return buffer

    agree(True)  # the first collective makes the communicator, without which nothing can be registered
    reason = ""
    try:
        allocate(_ALIGNMENT)
    # What torch and NCCL without it answer: ranks agree below to copy rows, and a line says so. All else is a fault.
    except (AttributeError, RuntimeError, TypeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if agree(not reason):
        return RegisteredRoom(allocate)
    log.info("NCCL: buffers are not registered, rows are copied: %s", reason or "another rank cannot")
    return None
