"""On which rank each replica of a layer stands: equal numbers of slots, loads as even as they get.

Not in which domain (spread.py), which it takes as given unless no rank there can take a replica.
Pure; units: load in tokens per replica. E experts, N domains, P slots, W ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_SWAPS_PER_RANK = 8


@dataclass(frozen=True, kw_only=True)
class Packed:
    """What stands on ranks.

    Attributes:
        experts: of each rank, ascending.
        imbalance: load of the fullest rank / mean; 1.0 without load.
    """

    experts: list[list[int]]
    imbalance: float


def pack_ranks(load: np.ndarray, copies: np.ndarray, rank_domain: np.ndarray, slot_counts: np.ndarray) -> Packed:
    """Give every replica a rank.

    Heaviest replica first onto the emptiest rank of its domain that has a slot left and not the same expert; then the
    fullest rank swaps with another of its domain while that makes it emptier. No rank holds an expert twice unless
    there are more slots than experts times ranks.

    Args:
        load: [E, N], what one replica of each expert gets in each domain.
        copies: [E, N], replicas of each expert in each domain.
        rank_domain: [W], the domain of each rank, counted from 0.
        slot_counts: [W], slots of each rank, within one of each other.
    """
    ranks = _Ranks(len(copies), slot_counts, rank_domain)
    may_repeat = int(slot_counts.sum()) > len(copies) * len(slot_counts)  # then some rank must hold an expert twice
    expert, domain = np.nonzero(copies)
    number = copies[expert, domain]
    expert, domain = np.repeat(expert, number), np.repeat(domain, number)
    weight = load[expert, domain]
    for item in np.lexsort((domain, expert, -weight)):
        ranks.place(int(expert[item]), float(weight[item]), int(domain[item]), may_repeat=may_repeat)
    ranks.even_out()
    return ranks.packed()


class _Ranks:
    """Replicas on ranks while they are packed."""

    def __init__(self, num_experts: int, slot_counts: np.ndarray, rank_domain: np.ndarray) -> None:
        self._domain, self._left = rank_domain, slot_counts.copy()
        self._load = np.zeros(len(slot_counts))
        self._holds = np.zeros((len(slot_counts), num_experts), np.int64)
        self._expert: list[int] = []
        self._weight: list[float] = []
        self._rank: list[int] = []

    def place(self, expert: int, weight: float, domain: int, *, may_repeat: bool) -> None:
        """Give one replica a rank."""
        free = self._left > 0
        new = free & (self._holds[:, expert] == 0)
        for wanted in (new & (self._domain == domain), new, free & may_repeat):
            if wanted.any():
                self._add(expert, weight, int(np.where(wanted, self._load, np.inf).argmin()))
                return
        self._make_room(expert, weight)

    def _make_room(self, expert: int, weight: float) -> None:
        """Put the replica on a full rank without its expert, whose lightest movable replica takes the free slot.

        All ranks with a slot left hold the expert. One that does not exists, because no expert has more replicas than
        there are ranks, and it holds at least as many experts as that one, so it has one that the other lacks.
        """
        free = int(np.where(self._left > 0, self._load, np.inf).argmin())
        best: tuple[float, int] | None = None
        for item, (other, rank) in enumerate(zip(self._expert, self._rank)):
            if self._holds[rank, expert] == 0 and self._holds[free, other] == 0:
                height = max(self._load[rank] - self._weight[item] + weight, self._load[free] + self._weight[item])
                if best is None or height < best[0]:
                    best = (height, item)
        assert best is not None, "a full rank has an expert that another rank lacks"
        item = best[1]
        rank = self._rank[item]
        self._move(item, free)
        self._left[free] -= 1
        self._left[rank] += 1
        self._add(expert, weight, rank)

    def _add(self, expert: int, weight: float, rank: int) -> None:
        self._left[rank] -= 1
        self._load[rank] += weight
        self._holds[rank, expert] += 1
        self._expert.append(expert)
        self._weight.append(weight)
        self._rank.append(rank)

    def _move(self, item: int, rank: int) -> None:
        """Move a replica, without counting slots."""
        old, expert, weight = self._rank[item], self._expert[item], self._weight[item]
        self._load[old] -= weight
        self._holds[old, expert] -= 1
        self._load[rank] += weight
        self._holds[rank, expert] += 1
        self._rank[item] = rank

    def even_out(self) -> None:
        """Swap replicas of the fullest rank with lighter ones of its domain while that makes it emptier."""
        expert, weight = np.array(self._expert), np.array(self._weight)
        for _ in range(_SWAPS_PER_RANK * len(self._load)):
            rank = np.array(self._rank)
            full = int(self._load.argmax())
            mine = np.flatnonzero(rank == full)
            theirs = np.flatnonzero((rank != full) & (self._domain[rank] == self._domain[full]))
            if not mine.size or not theirs.size:
                return
            shift = weight[mine][:, None] - weight[theirs][None]
            after = np.maximum(self._load[full] - shift, self._load[rank[theirs]][None] + shift)
            allowed = (shift > 0) & (after < self._load[full] * (1 - 1e-9))
            allowed &= self._holds[rank[theirs]][:, expert[mine]].T == 0
            allowed &= (self._holds[full, expert[theirs]] == 0)[None]
            if not allowed.any():
                return
            i, j = divmod(int(np.where(allowed, after, np.inf).argmin()), len(theirs))
            other = int(rank[theirs[j]])
            self._move(int(mine[i]), other)
            self._move(int(theirs[j]), full)

    def packed(self) -> Packed:
        """Return the outcome."""
        held: list[list[int]] = [[] for _ in self._load]
        for expert, rank in zip(self._expert, self._rank):
            held[rank].append(expert)
        mean = float(self._load.mean())
        return Packed(
            experts=[sorted(each) for each in held], imbalance=float(self._load.max()) / mean if mean else 1.0
        )
