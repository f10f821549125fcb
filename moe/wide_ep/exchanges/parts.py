"""Which rank or domain each choice of a token names, and which rows go there: a row once, however many it names.

Not sorting by slot (pairs.py) and not sending (links.py). Parts are ranks or domains: both own consecutive slots.
Letters: T tokens, R rows, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def parts_of(physical_ids: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:
    """Return which part of consecutive slots (those of a rank, or of a domain) each id names.

    Args:
        physical_ids: [T, K] i32, -1 for a dropped pair.
        stops: [parts] i32, where each part ends, on the same device; a part may be empty.

    Returns:
        [T, K] i32, -1 for a dropped pair.

    Raises:
        RuntimeError: an id names no slot.
    """
    num_slots = int(stops[-1])
    if physical_ids.numel() and (most := int(physical_ids.max())) >= num_slots:
        raise RuntimeError(f"physical id {most} names no expert slot; there are {num_slots}")
    parts = torch.searchsorted(stops, physical_ids.contiguous(), right=True, out_int32=True)
    return parts.masked_fill_(physical_ids < 0, -1)


def rows_by_part(parts: torch.Tensor, num_parts: int) -> tuple[torch.Tensor, list[int]]:
    """Return which tokens go to each part, each token once to a part however often it names it.

    Args:
        parts: [T, K], -1 for a dropped pair.
        num_parts: how many there are.

    Returns:
        tokens [N] i64, by part, then token; how many there are for each part.
    """
    numbers = torch.arange(num_parts, device=parts.device).view(-1, 1, 1)
    hit = (parts == numbers).any(2)  # [parts, T]
    counts: list[int] = hit.sum(1).tolist()
    return hit.nonzero()[:, 1], counts


def local_ids(physical_ids: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return ids counted from `start`, [R, K] i32, and -1 for those outside of [start, stop)."""
    return (physical_ids - start).masked_fill_((physical_ids < start) | (physical_ids >= stop), -1)


def pairs_from_each(ids: torch.Tensor, num_rows: Sequence[int]) -> list[int]:
    """Return how many pairs are in each run of consecutive rows.

    Args:
        ids: [R, K], -1 for a dropped pair.
        num_rows: of each run, in all R.
    """
    counts = torch.split((ids >= 0).sum(1), list(num_rows))
    totals: list[int] = torch.stack([run.sum() for run in counts]).tolist()
    return totals
