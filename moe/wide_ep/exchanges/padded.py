"""The exchange whose shapes do not depend on where rows go: capacity for the worst case of the plan's bucket.

Not for large steps: every row goes to every rank, and room for every choice comes back from each (larger steps use
all_to_all.py, as topologies/exchange_choice.py says). Nothing here waits for a number to come to the host, so a CUDA
graph can hold it, and it cannot overflow. Two collectives a layer. Of the bitwise class.
Letters: T tokens, D width, K top-k, C capacity (rows of a rank), W ranks, M = W * C * K, P_local slots of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....topologies.exchange_cost import capacity_of
from .contract import Dispatched
from .group_shape import GroupShape
from .links import Link
from .over_links import ExchangeOverLinks
from .pairs import PairKernels, SortedPairs, add_pairs
from .parts import local_ids
from .stages import ANSWERS, ROWS, Stages
from .wire import Payload, pack, unpack


@dataclass(frozen=True, kw_only=True)
class _Handle:
    """`leaving` [M] takes outputs from slot order to (rank, token, k); `home` finds those of this rank.

    For kernels `home` is the row of each choice, [T, K] i32.
    """

    leaving: torch.Tensor
    home: SortedPairs | torch.Tensor


class PaddedExchange(ExchangeOverLinks):
    """`Exchange` of one rank over a link that joins all ranks in their order. Call `begin_step` before each step.

    Traffic counts room, filled or not.

    Args:
        link: of the W ranks.
        shape: of the group.
        payload: how rows are written on their way out; None: as they are.

    Attributes:
        kernels: what sorts and adds in place of torch.
    """

    name = "padded"

    def __init__(self, link: Link, shape: GroupShape, *, payload: Payload | None = None) -> None:
        super().__init__((link,), payload)
        self._link, self._shape = link, shape
        self._range = shape.slot_ranges[link.index]
        self._scopes = shape.scopes(link.index)
        self._widest = max(self._scopes)
        self._stops = torch.tensor([stop for _, stop in shape.slot_ranges], dtype=torch.int32)
        self._of_slots = torch.arange(self._range[1] - self._range[0] + 1, dtype=torch.int32)
        self._capacity = 1
        self.kernels: PairKernels | None = None

    def begin_step(self, bucket: int) -> None:
        """Make room for a step with at most `bucket` rows on any rank."""
        self._capacity = capacity_of(bucket)

    def _dispatch(
        self, x: torch.Tensor, physical_ids: torch.Tensor, topk_weights: torch.Tensor | None
    ) -> Stages[Dispatched]:
        """Weights do not travel: they are of use at home only."""
        device, (num_tokens, top_k), capacity = x.device, physical_ids.shape, self._capacity
        assert num_tokens <= capacity, f"{num_tokens} rows, but the plan's bucket makes room for {capacity}"
        if self._stops.device != device:
            self._stops, self._of_slots = self._stops.to(device), self._of_slots.to(device)
        if device.type == "cpu":  # elsewhere the look itself would make the host wait
            self._check(physical_ids)
        ids = torch.full((capacity, top_k), -1, dtype=torch.int32, device=device)
        ids[:num_tokens] = physical_ids
        padded = x.new_zeros(capacity, x.shape[1])
        padded[:num_tokens] = x
        rows = pack(ids, self._payload.encode(padded))
        self._count(rows.numel())
        with self._meter.collective(self._widest, device):
            pending = self._link.gather(rows)
        home = self._home(physical_ids)
        yield ROWS
        arrived = self._meter.waiting(pending, self._widest, device)()
        found, body = unpack(arrived, top_k)  # [W * C, K] by rank, then token
        local, source = local_ids(found, *self._range), self._payload.decode(body, x.dtype, x.shape[1])
        if self.kernels is not None:
            row_tokens, rows_of, counts = self.kernels.sort(local.contiguous(), len(self._of_slots) - 1)
            leaving = rows_of.view(-1).clamp(min=0)
        else:
            pairs = self._sort(local)
            row_tokens, counts = pairs.tokens.to(torch.int32), pairs.counts
            leaving = pairs.positions.t().reshape(-1)
        return Dispatched(
            source=source,
            row_tokens=row_tokens,
            tokens_per_slot=counts,
            handle=_Handle(leaving=leaving, home=home),
            is_padded=True,
            expected_rows=capacity * top_k,  # of all W * C * K choices a rank gets one W-th
        )

    def _combine(self, rows: torch.Tensor, topk_weights: torch.Tensor, handle: _Handle) -> Stages[torch.Tensor]:
        leaving = rows.index_select(0, handle.leaving).view(torch.uint8)  # [M, ..]
        each = leaving.shape[0] // self._link.size
        self._count(each * leaving.shape[1])
        split = [each] * self._link.size
        with self._meter.collective(self._widest, rows.device):
            pending = self._link.start(leaving, split, split, evenly=True)
        yield ANSWERS
        home = self._meter.waiting(pending, self._widest, rows.device)()
        if isinstance(handle.home, SortedPairs):
            return add_pairs(home.view(rows.dtype), topk_weights, handle.home)
        assert self.kernels is not None
        return self.kernels.add(home.view(rows.dtype), topk_weights, handle.home)

    def _check(self, physical_ids: torch.Tensor) -> None:
        if physical_ids.numel() and (most := int(physical_ids.max())) >= self._shape.num_slots:
            raise RuntimeError(f"physical id {most} names no expert slot; there are {self._shape.num_slots}")

    def _sort(self, ids: torch.Tensor) -> SortedPairs:
        """Return all M pairs of `ids` [W * C, K] by slot, dropped ones behind; its counts are on the device."""
        flat = ids.reshape(-1)
        num_slots = self._of_slots.shape[0] - 1
        slots, order = flat.masked_fill(flat < 0, num_slots).sort(stable=True)
        bounds = torch.searchsorted(slots, self._of_slots)  # [P_local + 1] i64
        places = torch.arange(flat.shape[0], device=flat.device)
        positions = torch.empty_like(order).scatter_(0, order, places).view(ids.shape).t()
        return SortedPairs(
            tokens=order // ids.shape[1], offsets=[], counts=bounds.diff(), positions=positions, dropped=None
        )

    def _home(self, physical_ids: torch.Tensor) -> SortedPairs | torch.Tensor:
        """Return where the outputs of this rank's choices stand among all that come back: [W, C, K] rows."""
        num_tokens, top_k = physical_ids.shape
        owners = torch.searchsorted(self._stops, physical_ids.contiguous(), right=True)  # [T, K] i64
        choices = torch.arange(num_tokens * top_k, device=physical_ids.device).view(num_tokens, top_k)
        dropped = physical_ids < 0
        positions = owners * (self._capacity * top_k) + choices
        if self.kernels is not None:
            return positions.masked_fill(dropped, -1).to(torch.int32)
        positions = positions.masked_fill(dropped, 0)
        return SortedPairs(
            tokens=choices.view(-1), offsets=[], counts=self._of_slots[:0], positions=positions.t(), dropped=dropped.t()
        )

    def _count(self, bytes_to_each: int) -> None:
        for scope in self._scopes:
            self._meter.count(scope, bytes_to_each)
