"""Which replica each rank uses for each expert: quotas in whole source ranks, cut before the first token comes.

Not a placement (balanced.py makes one) and not a lookup (record.py does it): arrays in, one table out, for one layer.
Units: load in tokens per expert over the group; a rank brings 1/W of it. E experts, R replicas, P slots, W ranks.
"""

from __future__ import annotations

import numpy as np

# A replica that is further away is used only while the fullest rank has more than this times the mean: rows to another
# rank of the domain are cheap, rows to another domain take a link that is an order of magnitude slower.
_LEAVE_RANK_ABOVE = 1.02
_LEAVE_DOMAIN_ABOVE = 1.15
MOVES_PER_RANK = 16
_SAME_RANK, _SAME_DOMAIN, _OTHER_DOMAIN = 0, 1, 2


def choose_replicas(
    slots: np.ndarray,
    slot_rank: np.ndarray,
    rank_domain: np.ndarray,
    load: np.ndarray | None,
    *,
    moves_per_rank: int = MOVES_PER_RANK,
) -> np.ndarray:
    """Return the slot of each rank for each expert: [W, E] i32, -1 where nobody holds it.

    A rank uses its own replica, else one of its domain, else any; replicas that are equally near share the ranks that
    ask so that their counts differ by at most one, the replica on the emptier rank first. Then ranks are moved, one
    expert at a time, from the fullest rank to another replica, nearest first, while that makes the fullest emptier.
    Where the load is not known nobody is moved: there is no reason to go further.

    Args:
        slots: [E, R] i32, the slots of each expert, padded with -1 at the end.
        slot_rank: [P], the rank of each slot.
        rank_domain: [W], the domain of each rank.
        load: [E], tokens that each expert gets; None: not known.
        moves_per_rank: so many choices are moved off fullest ranks, times W, at most: the first few bring most of it,
            and the fewer there are, the less can be lost where another load comes.

    Example:
        >>> choose_replicas(np.array([[0, 2], [1, -1]]), np.array([0, 0, 1]), np.array([0, 0]), None).tolist()
        [[0, 1], [2, 1]]
    """
    num_ranks = len(rank_domain)
    if not slots.size:
        return np.empty((num_ranks, slots.shape[0]), np.int32)
    count = (slots >= 0).sum(1)  # [E]
    choice = np.tile(slots[:, 0].astype(np.int32), (num_ranks, 1))  # [W, E]
    shared = np.flatnonzero(count > 1)
    if not shared.size:
        return choice
    is_known = load is not None and bool(load.any())
    load = load.astype(np.float64) if load is not None and is_known else np.ones(len(slots))
    shared = shared[np.argsort(-load[shared], kind="stable")]  # heaviest first, ties to the lower id
    ranks = np.where(slots[shared] >= 0, slot_rank[slots[shared]], -1)  # [J, R]
    single = count == 1
    rank_load = np.bincount(slot_rank[slots[single, 0]], load[single], num_ranks)
    share = load[shared] / num_ranks  # [J], what one rank brings
    picks = np.empty((len(shared), num_ranks), np.int64)  # [J, W], which of its replicas
    for j, expert in enumerate(shared):
        held_by = ranks[j, : count[expert]]
        picks[j] = share_out(held_by, rank_domain, rank_load)
        np.add.at(rank_load, held_by[picks[j]], share[j])
    if is_known:
        _even_out(picks, ranks, rank_domain, share, rank_load, moves_per_rank * num_ranks)
    choice[:, shared] = np.take_along_axis(slots[shared], picks, 1).T
    return choice


def share_out(held_by: np.ndarray, rank_domain: np.ndarray, rank_load: np.ndarray) -> np.ndarray:
    """Return which replica each rank uses, nearest first: [W], of one expert whose replicas stand on `held_by` [R]."""
    num_ranks = len(rank_domain)
    picks = np.full(num_ranks, -1)
    picks[held_by[::-1]] = np.arange(len(held_by))[::-1]  # two on one rank: the first serves it
    taken = np.bincount(picks[held_by], minlength=len(held_by))
    taken = np.minimum(taken, 1)
    domain_of = rank_domain[held_by]
    for domain in np.unique(domain_of):
        near = np.flatnonzero(domain_of == domain)
        asking = np.flatnonzero((rank_domain == domain) & (picks < 0))
        if asking.size:
            near = near[np.lexsort((near, rank_load[held_by[near]], taken[near]))]
            picks[asking] = near[np.arange(asking.size) % near.size]
            taken += np.bincount(picks[asking], minlength=len(held_by))
    for rank in np.flatnonzero(picks < 0):
        picks[rank] = np.lexsort((rank_load[held_by], taken))[0]
        taken[picks[rank]] += 1
    return picks


def _even_out(
    picks: np.ndarray, ranks: np.ndarray, rank_domain: np.ndarray, share: np.ndarray, rank_load: np.ndarray, most: int
) -> None:
    """Move choices in `picks` [J, W] off the fullest rank; `ranks` [J, R] hold the replicas, `share` [J] is a move."""
    mean = rank_load.mean()
    for _ in range(most):
        full = int(rank_load.argmax())
        at = np.take_along_axis(ranks, picks, 1)  # [J, W]
        expert, source = np.nonzero(at == full)
        if not expert.size:
            return
        other = ranks[expert]  # [n, R]
        moved = share[expert][:, None]
        after = np.maximum(rank_load[full] - moved, rank_load[other] + moved)  # [n, R]
        now = _distance(source, np.full(len(source), full), rank_domain)[:, None]
        then = _distance(source[:, None], other, rank_domain)
        limit = np.where(then == _OTHER_DOMAIN, _LEAVE_DOMAIN_ABOVE, _LEAVE_RANK_ABOVE) * mean
        allowed = (other >= 0) & (other != full) & (moved > 0) & ((then <= now) | (rank_load[full] > limit))
        allowed &= after < rank_load[full] * (1 - 1e-9)
        if not allowed.any():
            return
        further = np.maximum(then - now, 0)
        nearest = further[allowed].min()
        best = int(np.where(allowed & (further == nearest), after, np.inf).argmin())
        row, replica = divmod(best, other.shape[1])
        picks[expert[row], source[row]] = replica
        rank_load[full] -= share[expert[row]]
        rank_load[other[row, replica]] += share[expert[row]]


def _distance(source: np.ndarray, target: np.ndarray, rank_domain: np.ndarray) -> np.ndarray:
    """Return how far rows go from rank `source` to rank `target`, elementwise."""
    near = np.where(rank_domain[source] == rank_domain[target], _SAME_DOMAIN, _OTHER_DOMAIN)
    return np.where(source == target, _SAME_RANK, near)
