"""The exchange over two kinds of links: one copy of a row crosses to another domain, and is handed on inside it.

Not of the bitwise class: outputs are added inside a domain first (in fp32, ascending k among the choices there, each
product rounded before it is added), that sum is rounded to the activation dtype, so that one row a token and domain
comes back, and the domains' sums are added in ascending order in fp32 and rounded once. A token's own domain does the
same, so that a result does not depend on where its token is at home. reference.py has this in loops.
Seven collectives a layer; the weights of crossing tokens travel while outputs come together inside the domains, or with
their rows where a dispatch is given them. A stage (stages.py) ends where rows cross; inside a domain nobody turns away.
Letters: T tokens, D width, K top-k, C domains, S rows that stand at a relay, R rows received, M pairs here, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from ....telemetry import RankProgress
from .contract import Dispatched
from .group_shape import GroupShape
from .links import Link, Pending, start_counts, swap, swap_counts
from .over_links import ExchangeOverLinks
from .pairs import SortedPairs, add_pairs, sort_pairs
from .parts import local_ids, pairs_from_each, parts_of, rows_by_part
from .stages import ANSWERS, COUNTS, ROWS, Stages
from .traffic import BETWEEN_DOMAINS, IN_DOMAIN, SAME_RANK
from .wire import Payload, pack, unpack

_COUNT_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class _Crossing:
    """What went over the rail.

    Attributes:
        tokens: [N] i64 of this rank, those of each rail member's domain after those of the one before; its own too.
        sent, received: rows to and from each member of the rail; of its own there are as many in both.
    """

    tokens: torch.Tensor
    sent: list[int]
    received: list[int]


@dataclass(frozen=True, kw_only=True)
class _Handle:
    """What is needed on the way back, in the order of its steps.

    Attributes:
        leaving: [M] i64, outputs from slot order into the order in which they go to the relays of their rows.
        num_leaving: to each member of the domain.
        gathered: pairs of the S rows that stand here: by member of the domain, then row, then k.
        crossing: see there.
        home: pairs of a token and a domain: by domain, then token.
        weights: [S, K] f32 of the rows that stand here, where they came with them.
    """

    leaving: torch.Tensor
    num_leaving: list[int]
    gathered: SortedPairs
    crossing: _Crossing
    home: SortedPairs
    weights: torch.Tensor | None


class HierarchicalExchange(ExchangeOverLinks):
    """`Exchange` of one rank of a group that spans domains.

    Traffic counts what the rank sends, counts included, and what it hands on for others, too.

    Args:
        rail: joins the ranks of this rank's rail (`GroupShape.rails`), in their order.
        domain: joins the ranks of its domain.
        shape: of the group.
        rank: of this process.
        payload: how rows are written on their way out; None: as they are.
        progress: ticked between collectives.
    """

    name = "hierarchical"

    def __init__(
        self,
        rail: Link,
        domain: Link,
        shape: GroupShape,
        rank: int,
        *,
        payload: Payload | None = None,
        progress: RankProgress | None = None,
    ) -> None:
        super().__init__((rail, domain), payload)
        self._rail, self._domain, self._progress = rail, domain, progress
        self._range = shape.slot_ranges[rank]
        number = shape.rail_of(rank)
        relays = shape.relays(number)
        # Rows for a domain go to its relay; those for the own domain stay, whoever is the relay there.
        self._own_domain = shape.domain_of[rank]
        self._entry = [rank if relay in shape.domains[self._own_domain] else relay for relay in relays]
        self._members = shape.rails[number]
        members = torch.tensor(self._members, dtype=torch.int32)
        self._rail_ranks = members
        own = shape.domains[self._own_domain]
        scopes = shape.scopes(rank)
        self._partner_scopes = [scopes[other] for other in (*self._members, *own) if other != rank]
        first, last = shape.slot_ranges[own[0]][0], shape.slot_ranges[own[-1]][1]
        self._domain_range = (first, last)
        self._member_stops = torch.tensor([shape.slot_ranges[r][1] - first for r in own], dtype=torch.int32)
        self._domain_stops = torch.tensor(
            [shape.slot_ranges[ranks[-1]][1] for ranks in shape.domains], dtype=torch.int32
        )
        self._of_domains = torch.arange(len(shape.domains) + 1, dtype=torch.int32)
        self._of_members = torch.arange(len(own) + 1, dtype=torch.int32)
        self._of_slots = torch.arange(self._range[1] - self._range[0] + 1, dtype=torch.int32)

    def _dispatch(
        self, x: torch.Tensor, physical_ids: torch.Tensor, topk_weights: torch.Tensor | None
    ) -> Stages[Dispatched]:
        device, top_k = x.device, physical_ids.shape[1]
        self._come_to(device)
        domains = self._domains_of(physical_ids)  # [T, C] i32
        tokens, sent = self._rows_to_members(domains)
        with self._meter.collective(BETWEEN_DOMAINS, device):
            counts_come = start_counts(self._rail, sent, device)
        home = sort_pairs(domains, self._of_domains)
        rows = pack(physical_ids, self._payload.encode(x))
        if topk_weights is not None:
            rows = torch.cat((topk_weights.contiguous().view(torch.uint8), rows), dim=1)
        rows = rows.index_select(0, tokens)
        yield COUNTS
        with self._meter.collective(BETWEEN_DOMAINS, device):
            crossing = _Crossing(tokens=tokens, sent=sent, received=counts_come().tolist())
        self._tick()
        rows_come = self._cross(rows, crossing)
        yield ROWS
        standing = rows_come()  # [S, ..] by source rank, then token
        self._tick()
        weights = None
        if topk_weights is not None:
            written, standing = unpack(standing, top_k)
            weights = written.view(torch.float32)
        sources = torch.repeat_interleave(self._rail_ranks, torch.tensor(crossing.received, device=device))
        ids = local_ids(unpack(standing, top_k)[0], *self._domain_range)
        owners = parts_of(ids, self._member_stops)
        gathered = sort_pairs(owners, self._of_members)
        chosen, sent = rows_by_part(owners, self._domain.size)
        with self._meter.collective(IN_DOMAIN, device):
            received = swap_counts(self._domain, sent, device)
        self._tick()
        onward = torch.cat((sources.view(-1, 1).view(torch.uint8), standing), dim=1).index_select(0, chosen)
        arrived = self._inside(onward, sent, received)  # [R, ..] by relay, then source, then token
        header, body = unpack(arrived, 1 + top_k)
        ids = local_ids(header[:, 1:], *self._range)  # [R, K]
        order = header[:, 0].argsort(stable=True)  # by source, then token
        pairs = sort_pairs(ids.index_select(0, order), self._of_slots)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=device))
        positions = pairs.positions.t().index_select(0, place)  # [R, K], rows as they arrived
        return Dispatched(
            source=self._payload.decode(body.index_select(0, order), x.dtype, x.shape[1]),
            row_tokens=pairs.tokens.to(torch.int32),
            tokens_per_slot=pairs.counts,
            handle=_Handle(
                leaving=positions[ids >= 0],
                num_leaving=pairs_from_each(ids, received),
                gathered=gathered,
                crossing=crossing,
                home=home,
                weights=weights,
            ),
        )

    def _combine(self, rows: torch.Tensor, topk_weights: torch.Tensor, handle: _Handle) -> Stages[torch.Tensor]:
        crossing, device = handle.crossing, rows.device
        weights_come: Pending | None = None
        if handle.weights is None:
            written = topk_weights.contiguous().view(torch.uint8).index_select(0, crossing.tokens)
            weights_come = self._cross(written, crossing)
        expected = [stop - start for start, stop in pairwise(handle.gathered.offsets)]
        leaving = rows.index_select(0, handle.leaving).view(torch.uint8)
        outputs = self._inside(leaving, handle.num_leaving, expected).view(rows.dtype)
        weights = handle.weights if weights_come is None else weights_come().view(torch.float32)  # [S, K]
        self._tick()
        assert weights is not None
        sums = add_pairs(outputs, weights, handle.gathered)  # [S, D], rounded
        back = _Crossing(tokens=crossing.tokens, sent=crossing.received, received=crossing.sent)
        sums_come = self._cross(sums.view(torch.uint8), back)
        yield ANSWERS
        by_domain = sums_come().view(rows.dtype)  # by domain, then token
        ones = torch.ones(topk_weights.shape[0], len(self._entry), device=device)
        return add_pairs(by_domain, ones, handle.home)

    def _come_to(self, device: torch.device) -> None:
        if self._of_slots.device != device:
            for name in ("_rail_ranks", "_member_stops", "_domain_stops", "_of_domains", "_of_members", "_of_slots"):
                setattr(self, name, getattr(self, name).to(device))

    def _domains_of(self, physical_ids: torch.Tensor) -> torch.Tensor:
        """Return [T, C] i32: c in column c where the token has a choice in domain c, else -1."""
        named = parts_of(physical_ids, self._domain_stops)
        columns = self._of_domains[:-1]
        hit = (named.unsqueeze(2) == columns).any(1)  # [T, C]
        return torch.where(hit, columns, -1)

    def _rows_to_members(self, domains: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """Return which tokens cross, [N] i64 by domain, then token, and how many to each member of the rail."""
        tokens, per_domain = rows_by_part(domains, len(self._entry))
        to = dict(zip(self._entry, per_domain, strict=True))
        for scope in self._partner_scopes:
            self._meter.count(scope, _COUNT_BYTES)
        return tokens, [to.get(member, 0) for member in self._members]

    def _cross(self, rows: torch.Tensor, crossing: _Crossing) -> Pending:
        """Send rows along the rail; own ones take their place among those that arrive."""
        me = self._rail.index
        parts = torch.split(rows, crossing.sent)
        sent, received = list(crossing.sent), list(crossing.received)
        self._meter.count(SAME_RANK, sent[me] * rows.shape[1])
        self._meter.count(BETWEEN_DOMAINS, (sum(sent) - sent[me]) * rows.shape[1])
        own = parts[me]
        if self._rail.size == 1:
            return lambda: own
        sent[me] = received[me] = 0
        others = torch.cat([part for member, part in enumerate(parts) if member != me])
        with self._meter.collective(BETWEEN_DOMAINS, rows.device):
            pending = self._rail.start(others, sent, received)

        def wait() -> torch.Tensor:
            with self._meter.collective(BETWEEN_DOMAINS, rows.device):
                arrived = pending()
            before = sum(received[:me])
            return torch.cat((arrived[:before], own, arrived[before:]))

        return wait

    def _inside(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        me = self._domain.index
        self._meter.count(SAME_RANK, sent[me] * rows.shape[1])
        self._meter.count(IN_DOMAIN, (sum(sent) - sent[me]) * rows.shape[1])
        with self._meter.collective(IN_DOMAIN, rows.device):
            return swap(self._domain, rows, sent, received)

    def _tick(self) -> None:
        if self._progress is not None:
            self._progress.tick()
