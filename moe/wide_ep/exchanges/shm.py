"""The exchange of ranks that are processes of one host, through memory that all map; see native/csrc/shm.h.

Not a message goes between them: each rank publishes rows and choices and reads those of others in place. No copy is
made but the one into the shared memory. Works with any number format of rows, on CPUs.
Letters: T tokens, D width, K top-k, M rows received, P slots of the group, P_local of this rank, W ranks.
Units: bytes, seconds.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ....native.library import load
from ....telemetry import RankProgress
from ....topologies.host_memory import share_memory
from .contract import Dispatched
from .native_combine import native_combine
from .pairs import SortedPairs, add_pairs
from .traffic import IN_DOMAIN, SAME_RANK, Traffic, TrafficMeter

_LINE_BYTES = 128  # `struct ShmLine`
_PAGE = mmap.PAGESIZE
_SLICE_MS = 200  # signals are handled between two waits
_SPINS = 2000  # some 100 us: meetings are that close where every rank has a core of its own
_SPINS_WHERE_CORES_ARE_SHARED = 30
_NO_SUCH_SLOT, _TOO_MANY_TOKENS = 1, 2  # `enum ShmFaultKind`


class _GroupArgs(ctypes.Structure):
    """`struct ShmGroup`."""

    _fields_ = (
        ("memory", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("ids_at", "rows_at", "results_at", "row_bytes")),
        *((name, ctypes.c_int64) for name in ("capacity", "result_capacity")),
        ("slot_starts", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("ranks", "rank", "top_k", "spins")),
        ("sequence", ctypes.c_uint32),
        *((name, ctypes.c_int64) for name in ("stayed", "waited_ns", "wait_began", "wait_ended")),
    )


class ShmFaultArgs(ctypes.Structure):
    """`struct ShmFault`."""

    _fields_ = (("kind", ctypes.c_int32), ("rank", ctypes.c_int32), ("value", ctypes.c_int64))


class _DispatchArgs(ctypes.Structure):
    """`struct ShmDispatch`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("group", "x", "slot_ids")),
        *((name, ctypes.c_int64) for name in ("tokens", "x_stride")),
        *((name, ctypes.c_void_p) for name in ("row_tokens", "tokens_per_slot", "row_of")),
        *((name, ctypes.c_int64) for name in ("num_rows", "bytes_sent")),
        ("fault", ShmFaultArgs),
    )


@dataclass(frozen=True, kw_only=True)
class ShmShape:
    """What a group agrees about before it meets.

    Attributes:
        slot_ranges: (start, stop) of each rank, as in `ExpertPlacement`.
        capacity: the most tokens of a rank in a step.
        top_k: K.
        width: D.
        dtype: of the rows.
    """

    slot_ranges: tuple[tuple[int, int], ...]
    capacity: int
    top_k: int
    width: int
    dtype: torch.dtype

    @property
    def num_ranks(self) -> int:
        """W."""
        return len(self.slot_ranges)

    @property
    def row_bytes(self) -> int:
        """Of one row."""
        return self.width * self.dtype.itemsize

    @property
    def result_capacity(self) -> int:
        """The most rows that one rank can be sent: all choices of all tokens."""
        return self.num_ranks * self.capacity * self.top_k

    def offsets(self) -> tuple[int, int, int, int]:
        """Return where ids, rows and results begin, and where they end."""
        ids = _whole_pages(self.num_ranks * _LINE_BYTES)
        rows = ids + _whole_pages(self.num_ranks * self.capacity * self.top_k * 4)
        results = rows + _whole_pages(self.num_ranks * self.capacity * self.row_bytes)
        return ids, rows, results, results + _whole_pages(self.num_ranks * self.result_capacity * self.row_bytes)


def meet_at(place: Path, shape: ShmShape, rank: int, timeout_s: float) -> int:
    """Return a file descriptor of the group's memory: rank 0 makes it and says at `place` where it is.

    Raises:
        RuntimeError: rank 0 did not come in time.
    """
    total = shape.offsets()[-1]
    return share_memory(place, "exchange", total, is_first=rank == 0, timeout_s=timeout_s)


class ShmExchange:
    """`Exchange` of one rank of a group on one host.

    Args:
        fd: of the group's memory; stays open.
        shape: the same on all ranks.
        rank: of this process.
        has_cores: every thread of every rank on the host has a core, so that a rank may look for others a while before
            it sleeps; else it would take the core that they need.
        progress: ticked while this rank waits for others in a dispatch.
    """

    name = "shm"

    def __init__(
        self, fd: int, shape: ShmShape, rank: int, *, has_cores: bool = False, progress: RankProgress | None = None
    ) -> None:
        library = load()
        assert library is not None, "the exchange through shared memory needs native kernels"
        self._library, self._shape, self._rank, self._progress = library, shape, rank, progress
        self._fd = fd
        ids_at, rows_at, results_at, end = shape.offsets()
        self._memory = mmap.mmap(fd, end)
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        row = (shape.num_ranks, -1, shape.width)
        num_results = shape.num_ranks * shape.result_capacity
        rows = whole[rows_at : rows_at + shape.num_ranks * shape.capacity * shape.row_bytes]
        results = whole[results_at : results_at + num_results * shape.row_bytes]
        self._rows = rows.view(shape.dtype).view(-1, shape.width)  # [W * capacity, D]
        self._results = results.view(shape.dtype).view(-1, shape.width)  # [W * result_capacity, D]
        self._own_results = self._results.view(row)[rank]  # [result_capacity, D]
        self._num_local = shape.slot_ranges[rank][1] - shape.slot_ranges[rank][0]
        starts = [start for start, _ in shape.slot_ranges] + [shape.slot_ranges[-1][1]]
        self._starts = torch.tensor(starts, dtype=torch.int32)
        self.group = _GroupArgs(
            memory=whole.data_ptr(),
            ids_at=ids_at,
            rows_at=rows_at,
            results_at=results_at,
            row_bytes=shape.row_bytes,
            capacity=shape.capacity,
            result_capacity=shape.result_capacity,
            slot_starts=self._starts.data_ptr(),
            ranks=shape.num_ranks,
            rank=rank,
            top_k=shape.top_k,
            spins=_SPINS if has_cores else _SPINS_WHERE_CORES_ARE_SHARED,
        )
        self._row_tokens = torch.empty(shape.result_capacity, dtype=torch.int32)  # of the last dispatch
        self._meter = TrafficMeter()

    def dispatch(self, x: torch.Tensor, physical_ids: torch.Tensor) -> Dispatched:
        """Publish rows of `x` [T, D] and find those for this rank's slots; see `Exchange.dispatch`."""
        shape = self._shape
        self.check_tokens(x.shape[0])
        assert x.dtype == shape.dtype and x.shape[1] == shape.width and x.stride(1) == 1, (x.dtype, x.shape)
        ids = physical_ids.contiguous()
        counts = torch.empty(self._num_local, dtype=torch.int64)
        row_of = torch.empty_like(ids)
        args = _DispatchArgs(
            group=ctypes.addressof(self.group),
            x=x.data_ptr(),
            slot_ids=ids.data_ptr(),
            tokens=x.shape[0],
            x_stride=x.stride(0) * x.element_size(),
            row_tokens=self._row_tokens.data_ptr(),
            tokens_per_slot=counts.data_ptr(),
            row_of=row_of.data_ptr(),
        )
        self._library.moewe_shm_publish(ctypes.byref(args))
        self._wait(self._library.moewe_shm_wait_published)
        self._library.moewe_shm_collect(ctypes.byref(args))
        self.check_fault(args.fault)
        self._meter.count(IN_DOMAIN, args.bytes_sent)
        if self._progress is not None:
            self._progress.tick()
        row_tokens = self._row_tokens[: args.num_rows]
        return Dispatched(source=self._rows, row_tokens=row_tokens, tokens_per_slot=counts, handle=row_of)

    def output(self, num_rows: int) -> torch.Tensor:
        """Return [M, D] where outputs of experts can be written at once, so that `combine` need not copy them."""
        return self._own_results[:num_rows]

    def combine(self, rows: torch.Tensor, topk_weights: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
        """Offer rows [M, D] to those that wait for them, and add those of this rank; see `Exchange.combine`."""
        self.offer(rows)
        if rows.dtype == torch.bfloat16:
            return native_combine(self._results, topk_weights.contiguous(), handle)
        positions = handle.t().long()  # [K, T]
        dropped = positions < 0
        num_results = self._results.shape[0]
        pairs = SortedPairs(
            tokens=positions[:0, 0] if positions.shape[1] else positions.view(-1),
            offsets=[0, num_results],
            counts=positions.new_empty(0),
            positions=positions.clamp(min=0),
            dropped=dropped if bool(dropped.any()) else None,
        )
        return add_pairs(self._results, topk_weights, pairs)

    def offer(self, rows: torch.Tensor) -> torch.Tensor:
        """Put outputs [M, D] where all ranks see them and wait for theirs; return those of all: [W * capacity, D]."""
        own = self._own_results[: rows.shape[0]]
        if rows.data_ptr() != own.data_ptr():
            own.copy_(rows)
        self._library.moewe_shm_computed(ctypes.byref(self.group))
        self._wait(self._library.moewe_shm_wait_computed)
        return self._results

    def check_tokens(self, num_tokens: int) -> None:
        """Raise RuntimeError where a rank has more tokens in a step than there is room for."""
        self._check_tokens_of(self._rank, num_tokens)

    def check_fault(self, fault: ShmFaultArgs) -> None:
        """Raise RuntimeError for what native calls over `group` found wrong in what ranks published."""
        if fault.kind == _NO_SUCH_SLOT:
            slots = int(self._starts[-1])
            raise RuntimeError(
                f"physical id {fault.value} of rank {fault.rank} names no expert slot; there are {slots}"
            )
        if fault.kind == _TOO_MANY_TOKENS:
            self._check_tokens_of(fault.rank, fault.value)

    def _check_tokens_of(self, rank: int, num_tokens: int) -> None:
        capacity = self._shape.capacity
        if not 0 <= num_tokens <= capacity:
            raise RuntimeError(
                f"{num_tokens} tokens on rank {rank}; the exchange was made for max_num_batched_tokens={capacity}"
            )

    @property
    def buffer_bytes(self) -> int:
        """This rank's part of what the group's memory takes: pages that no row has come to take nothing."""
        return os.fstat(self._fd).st_blocks * 512 // self._shape.num_ranks + self._row_tokens.nbytes

    @property
    def most_rows(self) -> int:
        """How many rows can come to this rank in one dispatch."""
        return self._shape.result_capacity

    def count(self, num_bytes: int) -> None:
        """Book what native calls over `group` have sent."""
        self._meter.count(IN_DOMAIN, num_bytes)

    def take_traffic(self) -> Traffic:
        """Return what this rank and others read of it since the last call, each row once a rank, and its waiting."""
        group, meter = self.group, self._meter
        waited = 1e-9 * group.waited_ns  # rows are read where they lie, so all of it is for other ranks
        meter.count(SAME_RANK, group.stayed)
        meter.count_seconds(IN_DOMAIN, waited)
        group.stayed = group.waited_ns = 0
        return replace(meter.take(), waited_seconds=waited)

    def _wait(self, arrived: ctypes._FuncPointer) -> None:  # type: ignore[name-defined]
        # A rank that never comes is for the watchdog to judge: it ends this process.
        while not arrived(ctypes.byref(self.group), ctypes.c_int64(_SLICE_MS)):
            pass


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE
