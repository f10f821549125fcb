"""What dispatch and combine must give on every rank, seen from above all of them: loops, no group, nothing in flight.

Not fast and not used at run time; every exchange is compared with it, bit for bit. moe/reference.py has the layer.
Suffixes: T tokens of a rank, D width, K top-k, M rows received by a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .group_shape import GroupShape

# Slot number and the rows [N, D] that reached it -> [N, D] in the same dtype.
Expert = Callable[[int, torch.Tensor], torch.Tensor]


class DispatchedReference(NamedTuple):
    """What arrived on one rank.

    Attributes:
        rows_MD: sorted by slot, then source rank, then token, then k.
        tokens_per_slot: [P_local] i64.
        origins: (rank, token, k) of each row.
    """

    rows_MD: torch.Tensor
    tokens_per_slot: torch.Tensor
    origins: list[tuple[int, int, int]]


@dataclass(frozen=True, kw_only=True)
class ExchangeReference:
    """What one rank has before and after its experts.

    Attributes:
        arrived: what dispatch gives.
        outputs_MD: what its experts make of that.
        combined_TD: what combine gives.
    """

    arrived: DispatchedReference
    outputs_MD: torch.Tensor
    combined_TD: torch.Tensor


def exchange_reference(
    inputs_TD: Sequence[torch.Tensor],
    physical_ids_TK: Sequence[torch.Tensor],
    topk_weights_TK: Sequence[torch.Tensor],
    slot_ranges: Sequence[tuple[int, int]],
    expert: Expert,
    *,
    domains: Sequence[Sequence[int]] = (),
) -> list[ExchangeReference]:
    """Return what every rank gets when rank r brings `inputs_TD[r]`, `physical_ids_TK[r]` and `topk_weights_TK[r]`.

    Args:
        inputs_TD, physical_ids_TK, topk_weights_TK: of all ranks.
        slot_ranges: (start, stop) of each rank.
        expert: what slots compute.
        domains: ranks of each domain, to add outputs as `hierarchical` does; empty adds as all others do.
    """
    arrived = dispatch_reference(inputs_TD, physical_ids_TK, slot_ranges)
    outputs_MD = []
    for (start, _), own in zip(slot_ranges, arrived, strict=True):
        parts = torch.split(own.rows_MD, own.tokens_per_slot.tolist()) if len(own.tokens_per_slot) else ()
        computed = [expert(start + slot, rows) for slot, rows in enumerate(parts)]
        outputs_MD.append(torch.cat(computed) if computed else own.rows_MD)
    if domains:
        combined = combine_by_domain_reference(outputs_MD, topk_weights_TK, arrived, domains)
    else:
        combined = combine_reference(outputs_MD, topk_weights_TK, arrived)
    return [
        ExchangeReference(arrived=a, outputs_MD=o, combined_TD=c)
        for a, o, c in zip(arrived, outputs_MD, combined, strict=True)
    ]


def dispatch_reference(
    inputs_TD: Sequence[torch.Tensor],
    physical_ids_TK: Sequence[torch.Tensor],
    slot_ranges: Sequence[tuple[int, int]],
) -> list[DispatchedReference]:
    """Return what arrives on every rank when rank r sends `inputs_TD[r]` by `physical_ids_TK[r]`."""
    arrived = []
    for start, stop in slot_ranges:
        origins: list[tuple[int, int, int]] = []
        tokens_per_slot = []
        for slot in range(start, stop):
            before = len(origins)
            for rank, ids_TK in enumerate(physical_ids_TK):
                for token, ids in enumerate(ids_TK.tolist()):
                    origins += [(rank, token, k) for k, physical_id in enumerate(ids) if physical_id == slot]
            tokens_per_slot.append(len(origins) - before)
        rows = [inputs_TD[rank][token] for rank, token, _ in origins]
        rows_MD = torch.stack(rows) if rows else inputs_TD[0].new_empty(0, inputs_TD[0].shape[1])
        arrived.append(DispatchedReference(rows_MD, torch.tensor(tokens_per_slot, dtype=torch.int64), origins))
    return arrived


def combine_reference(
    outputs_MD: Sequence[torch.Tensor],
    topk_weights_TK: Sequence[torch.Tensor],
    dispatched: Sequence[DispatchedReference],
) -> list[torch.Tensor]:
    """Return [T, D] of every rank: sum over ascending k of weight * output, in fp32 from zero, rounded once."""
    at = {}
    for owner, arrival in enumerate(dispatched):
        for row, origin in enumerate(arrival.origins):
            at[origin] = outputs_MD[owner][row]
    combined = []
    for rank, weights_TK in enumerate(topk_weights_TK):
        total_TD = torch.zeros(weights_TK.shape[0], outputs_MD[0].shape[1])
        for token in range(weights_TK.shape[0]):
            for k in range(weights_TK.shape[1]):
                if (rank, token, k) in at:
                    product = at[rank, token, k].float() * weights_TK[token, k]
                    total_TD[token] = total_TD[token] + product
        combined.append(total_TD.to(outputs_MD[0].dtype))
    return combined


def combine_by_domain_reference(
    outputs_MD: Sequence[torch.Tensor],
    topk_weights_TK: Sequence[torch.Tensor],
    dispatched: Sequence[DispatchedReference],
    domains: Sequence[Sequence[int]],
) -> list[torch.Tensor]:
    """Return [T, D] of every rank, added domain by domain.

    Within a domain: sum over ascending k of weight * output, in fp32 from zero, rounded to the dtype of outputs. Then
    the sum of those over ascending domains, in fp32 from zero, rounded.
    """
    at = {}  # (rank, token, k) -> domain of the slot, output
    for domain, ranks in enumerate(domains):
        for owner in ranks:
            for row, origin in enumerate(dispatched[owner].origins):
                at[origin] = domain, outputs_MD[owner][row]
    dtype, width = outputs_MD[0].dtype, outputs_MD[0].shape[1]
    combined = []
    for rank, weights_TK in enumerate(topk_weights_TK):
        num_tokens, top_k = weights_TK.shape
        total_TD = torch.zeros(num_tokens, width)
        for token in range(num_tokens):
            for domain in range(len(domains)):
                within = torch.zeros(width)
                for k in range(top_k):
                    if (rank, token, k) in at and at[rank, token, k][0] == domain:
                        product = at[rank, token, k][1].float() * weights_TK[token, k]
                        within = within + product
                total_TD[token] = total_TD[token] + within.to(dtype).float()
        combined.append(total_TD.to(dtype))
    return combined


class Legs(NamedTuple):
    """Every row's way, leg by leg, as (from, to) ranks.

    Attributes:
        crossing: to the relay of a domain, which is the source itself in its own; empty unless hierarchical.
        inside: from there (from the source, unless hierarchical) to the ranks that read the row, each once.
        answers: of every choice, from the rank of its slot to where outputs are added first.
    """

    crossing: list[tuple[int, int]]
    inside: list[tuple[int, int]]
    answers: list[tuple[int, int]]


def legs_reference(physical_ids_TK: Sequence[torch.Tensor], shape: GroupShape, *, hierarchical: bool = False) -> Legs:
    """Return the legs of all rows of all ranks in one layer."""
    legs = Legs([], [], [])
    for rank, ids_TK in enumerate(physical_ids_TK):
        relays = shape.relays(shape.rail_of(rank))
        for ids in ids_TK.tolist():
            owners = [_owner(physical_id, shape) for physical_id in ids if physical_id >= 0]
            if not hierarchical:
                legs.inside.extend((rank, reader) for reader in sorted(set(owners)))
                legs.answers.extend((owner, rank) for owner in owners)
                continue
            for domain in sorted({shape.domain_of[owner] for owner in owners}):
                relay = rank if domain == shape.domain_of[rank] else relays[domain]
                here = [owner for owner in owners if shape.domain_of[owner] == domain]
                legs.crossing.append((rank, relay))
                legs.inside.extend((relay, reader) for reader in sorted(set(here)))
                legs.answers.extend((owner, relay) for owner in here)
    return legs


def _owner(physical_id: int, shape: GroupShape) -> int:
    return next(rank for rank, (start, stop) in enumerate(shape.slot_ranges) if start <= physical_id < stop)
