"""In which domains the replicas of each expert of a layer stand.

Not how many there are (replication.py) and not on which rank (packing.py). Pure; units: load in tokens per expert.
E experts, N domains. A domain with a replica of an expert serves itself; the others share all domains that have one.
"""

from __future__ import annotations

import numpy as np

# How much above its part of the load a domain may be when that brings experts together that fire together.
_TOLERANCE = 0.03


def spread_over_domains(
    load: np.ndarray,
    replicas: np.ndarray,
    capacity: np.ndarray,
    domain_ranks: np.ndarray,
    *,
    affinity: np.ndarray | None = None,
) -> np.ndarray:
    """Return how many replicas of each expert stand in each domain: [E, N] i64.

    Heaviest replicas first, each into a domain that has none of its expert yet: where the experts stand that fire
    together with it, as long as the domain can keep to its part of the load, else into the emptiest.

    Args:
        load: [E], tokens that each expert gets.
        replicas: [E], from `count_replicas`.
        capacity: [N], slots of each domain; together as many as replicas.
        domain_ranks: [N], ranks of each domain.
        affinity: [E, E], how much more often than by chance two experts fire together; None: not known.
    """
    assert int(capacity.sum()) == int(replicas.sum()), (capacity, replicas.sum())
    num_experts, num_domains = len(load), len(capacity)
    copies = np.zeros((num_experts, num_domains), np.int64)
    if num_domains == 1:
        copies[:, 0] = replicas
        return copies
    state = _Domains(load, capacity, domain_ranks, copies, affinity)
    for expert in np.lexsort((np.arange(num_experts), -load / replicas)):
        for _ in range(int(replicas[expert])):
            state.put(expert, state.best(expert, load[expert] / replicas[expert]))
        state.close(expert)
    if affinity is not None:
        _swap(state, load, np.flatnonzero(replicas == 1), affinity)
    return copies


class _Domains:
    """What stands where so far: slots left, load, and which domains serve how much of each expert."""

    def __init__(
        self,
        load: np.ndarray,
        capacity: np.ndarray,
        domain_ranks: np.ndarray,
        copies: np.ndarray,
        affinity: np.ndarray | None,
    ) -> None:
        self.load, self.copies, self.ranks = load, copies, domain_ranks
        self.left = capacity.copy()
        self.part = domain_ranks / domain_ranks.sum()  # of all tokens
        self.target = load.sum() * self.part * (1 + _TOLERANCE)
        self.coming = float(load.sum())  # load of experts that have no place yet
        self.domain_load = np.zeros(len(capacity))
        self.pull = np.zeros(copies.shape)  # [E, N], affinity of each expert to what a domain has
        self._affinity = affinity

    def put(self, expert: int, domain: int) -> None:
        """Place one replica."""
        self.copies[expert, domain] += 1
        self.left[domain] -= 1

    def best(self, expert: int, amount: float) -> int:
        """Return the domain for one more replica, which brings about `amount` of load."""
        here = self.copies[expert]
        free = self.left > 0
        if (free & (here < self.ranks)).any():
            free &= here < self.ranks
        density = np.where(free, here / self.ranks, np.inf)
        open_to = free & (density == density.min())
        fill = (self.domain_load + amount) / self.part
        # The slots that stay free must be filled too, with replicas like those that are still to come.
        light = max(0.0, self.coming - amount) / max(1, int(self.left.sum()) - 1)
        fits = open_to & (self.domain_load + amount + (self.left - 1) * light <= self.target)
        if not fits.any():
            return int(np.where(open_to, fill, np.inf).argmin())
        pull = np.where(fits, self.pull[expert], -np.inf)
        return int(np.where(fits & (pull >= pull.max() - 1e-12), fill, np.inf).argmin())

    def close(self, expert: int) -> None:
        """Count what a placed expert brings to each domain."""
        served = served_by(self.copies[expert], self.part)
        self.coming -= float(self.load[expert])
        self.domain_load += self.load[expert] * served
        if self._affinity is not None:
            self.pull += self._affinity[:, expert, None] * served


def served_by(copies: np.ndarray, part: np.ndarray) -> np.ndarray:
    """Return the part of an expert's rows that each domain computes: [..., N], of replicas [..., N] in each domain.

    Args:
        copies: replicas of an expert in each domain, at least one in all.
        part: [N], of all tokens that the ranks of each domain bring.
    """
    has = copies > 0
    homeless = (part * ~has).sum(-1, keepdims=True)
    share: np.ndarray = np.where(has, part + homeless / has.sum(-1, keepdims=True), 0.0)
    return share


def _swap(state: _Domains, load: np.ndarray, movable: np.ndarray, affinity: np.ndarray) -> None:
    """Swap experts with one replica between domains while that brings more together that fires together."""
    if len(movable) < 2:
        return
    domain = state.copies[movable].argmax(1)  # [m]
    among = affinity[np.ix_(movable, movable)]
    pull = state.pull[movable]
    weight = load[movable]
    gain_floor = 1e-9 * float(np.abs(affinity).sum())
    for _ in range(len(movable)):
        own = pull[np.arange(len(movable)), domain]
        there = pull[:, domain]  # [m, m]: of expert i to the domain of expert j
        gain = there + there.T - own[:, None] - own[None] - 2 * among
        shift = weight[:, None] - weight[None]  # leaves the domain of i for that of j
        highest = np.maximum(state.target, state.domain_load)
        now = state.domain_load[domain]
        fits = (now[:, None] - shift <= highest[domain][:, None]) & (now[None] + shift <= highest[domain][None])
        gain = np.where(fits & (domain[:, None] != domain[None]), gain, -np.inf)
        i, j = divmod(int(gain.argmax()), len(movable))
        if gain[i, j] <= gain_floor:
            break
        a, b = int(domain[i]), int(domain[j])
        state.domain_load[a] -= shift[i, j]
        state.domain_load[b] += shift[i, j]
        pull[:, a] += among[:, j] - among[:, i]
        pull[:, b] += among[:, i] - among[:, j]
        domain[i], domain[j] = b, a
    state.copies[movable] = 0
    state.copies[movable, domain] = 1
