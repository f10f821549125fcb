"""Changes of one layer that may pay: off the fullest rank, or into a domain that sends many rows out for an expert.

Not a decision: whoever asks works out what each of them saves (policy.py). Pure: arrays in, few changes out.
Units: rows of experts over a window. E experts, P slots, W ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# (slot, expert) of each transfer; all of a change come into force together.
Change = tuple[tuple[int, int], ...]
# Of each kind so many are looked at closely; the others lost in an estimate.
_LOOKED_AT = 4
_SLOTS_OF_DOMAIN = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerSlots:
    """Who stands where in one layer.

    Attributes:
        experts: [P], the expert of each slot.
        rank: [P], the rank of each slot.
        domain: [W], the domain of each rank.
        num_experts: E.
    """

    experts: np.ndarray
    rank: np.ndarray
    domain: np.ndarray
    num_experts: int

    @property
    def num_ranks(self) -> int:
        """W, ranks of the group."""
        return len(self.domain)

    @property
    def count(self) -> np.ndarray:
        """Replicas of each expert [E]."""
        return np.bincount(self.experts, minlength=self.num_experts)


def off_fullest(at: LayerSlots, by_slot: np.ndarray) -> list[Change]:
    """Return changes that take rows off the fullest rank: two slots swapped, or a spare replica replaced.

    The best few of all, and the best few that stay in the domain of that rank.

    Args:
        at: who stands where.
        by_slot: [P], rows of each slot.
    """
    slots, count, rows = at.experts, at.count, np.bincount(at.rank, by_slot, at.num_ranks)
    full = int(rows.argmax())
    own, other = np.flatnonzero(at.rank == full), np.flatnonzero(at.rank != full)
    held = np.zeros((at.num_ranks, at.num_experts), bool)
    held[at.rank, slots] = True
    target = rows[at.rank[other]]
    is_near = at.domain[at.rank[other]] == at.domain[full]
    has_own = held[at.rank[other]][:, slots[own]].T  # [own, other]
    # Swaps: the fuller of the two ranks afterwards.
    shift = by_slot[own][:, None] - by_slot[other][None]
    worst = np.maximum(rows[full] - shift, target[None] + shift)
    worst[has_own | held[full, slots[other]][None]] = np.inf
    swaps = [(int(own[i]), int(other[j])) for i, j in _least(worst, is_near)]
    # One more replica: an expert of the fullest rank, which others may use too, in place of a spare one.
    share = by_slot[own] / (count[slots[own]] + 1)
    worst = np.maximum(rows[full] - share[:, None], target[None] - by_slot[other][None] + share[:, None])
    worst[has_own | (count[slots[other]] < 2)[None]] = np.inf
    copies = [(int(own[i]), int(other[j])) for i, j in _least(worst, is_near)]
    return [((b, int(slots[a])), (a, int(slots[b]))) for a, b in swaps] + [((b, int(slots[a])),) for a, b in copies]


def _least(worst: np.ndarray, is_near: np.ndarray) -> list[tuple[int, int]]:
    """Return where the least of `worst` [own, other] stand, and where the least do that are near."""
    found: list[tuple[int, int]] = []
    for part in (np.ones(len(is_near), bool), is_near):
        columns = np.flatnonzero(part)
        values = worst[:, columns]
        for place in np.argsort(values, None, "stable")[:_LOOKED_AT].tolist():
            i, j = divmod(place, len(columns))
            if np.isfinite(values[i, j]) and (i, int(columns[j])) not in found:
                found.append((i, int(columns[j])))
    return found


def into_domains(at: LayerSlots, load: np.ndarray, *, noise: float) -> list[tuple[float, Change]]:
    """Return replicas for domains that have none of an expert, in place of spare ones, most rows kept in first.

    Args:
        at: who stands where.
        load: [E], rows of each expert, of which every rank brings an equal part.
        noise: what the domain would keep has to exceed so many standard deviations of what chance makes of even loads.

    Returns:
        (rows that would no longer cross, change), at most a handful.
    """
    count, domain_of = at.count, at.domain[at.rank]
    spare = count[at.experts] > 1
    if not spare.any():
        return []
    by_rank = np.bincount(at.rank, load[at.experts] / count[at.experts], at.num_ranks)
    found: list[tuple[float, Change]] = []
    for domain in np.unique(at.domain).tolist():
        here = np.bincount(at.experts[domain_of == domain], minlength=at.num_experts)
        absent = np.flatnonzero(here == 0)
        free = np.flatnonzero(spare & (domain_of == domain))
        if not absent.size or not free.size:
            continue
        expert = int(absent[load[absent].argmax()])
        # What has another replica here keeps its rows here without this one.
        lost = np.where(here[at.experts[free]] > 1, 0.0, load[at.experts[free]])
        brought, part = float(load[expert]), float((at.domain == domain).mean())
        for i in np.lexsort((by_rank[at.rank[free]], lost))[:_SLOTS_OF_DOMAIN].tolist():
            given = float(lost[i])
            if brought - given > noise * np.sqrt(brought + given):
                found.append(((brought - given) * part, ((int(free[i]), expert),)))
    return sorted(found, key=lambda pair: -pair[0])[:_LOOKED_AT]
