"""How long the experts of one MoE layer and their exchange take, by who sends how many rows to which slot. Pure.

Not a step of a whole model (cost.py) and not a measurement (link_probes.py): what it decides is which experts move.
A layer takes as long as its slowest rank: what its experts take, and what it puts on links in a dispatch and a combine.
Units: seconds, bytes, FLOP, rows (a token at one of its experts). W ranks, C domains, P slots, E experts, K a token,
G groups of the router.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .cost import EXCHANGES_A_LAYER, Ceilings, ExpertSpeed, product_seconds


@dataclass(frozen=True, kw_only=True)
class ExpertSize:
    """What a row costs at an expert, and an expert where it stands.

    Attributes:
        expert_bytes: weights of one expert of one layer.
        row_bytes: of a row on a link, one way.
        flops: of a row at an expert.
    """

    expert_bytes: int
    row_bytes: int
    flops: float


@dataclass(frozen=True, kw_only=True)
class TokenRows:
    """Which rows are of one token, and whether they cross to another domain together.

    Attributes:
        top_k: K, rows of a token, at as many experts.
        together: one copy of a token crosses to each other domain with experts of it, and is handed on there
            (`hierarchical`); False: every row crosses by itself.
        num_groups, top_groups: experts stand in so many equal runs, of which a token uses so many at most; 1 and 1: the
            router knows no groups.
    """

    top_k: int
    together: bool = False
    num_groups: int = 1
    top_groups: int = 1


class LayerCost:
    """What the experts of one layer and their exchange take, by rows and where they go.

    Experts of a rank take what binds of the weights of slots that are hit (rows come at random, so a slot that expects
    r of them is hit with 1 - exp(-r)) and of the arithmetic of its rows. On links a rank puts the rows that it sends
    out and those that it sends back, of its domain and of others at their own speeds; what a domain exchanges with
    others is shared evenly by its ranks, as relays do.

    Args:
        size: of an expert.
        ceilings: of each rank.
        slot_ranges: (start, stop) of each rank.
        domains: the domain of each rank.
        token: which rows belong together.
        experts: how fast they really run; None: as the ceilings say.
    """

    def __init__(
        self,
        size: ExpertSize,
        ceilings: Ceilings,
        slot_ranges: Sequence[tuple[int, int]],
        domains: Sequence[int],
        *,
        token: TokenRows,
        experts: ExpertSpeed | None = None,
    ) -> None:
        self._size, self._ceilings, self._experts, self._top_k = size, ceilings, experts, token.top_k
        self._num_ranks, self._num_slots = len(slot_ranges), slot_ranges[-1][1]
        self._owner = np.repeat(np.arange(self._num_ranks), [stop - start for start, stop in slot_ranges])
        self._links = _Links(size.row_bytes, ceilings, domains, token)

    def seconds(self, rows: np.ndarray, slots: np.ndarray) -> float:
        """Return what one step takes.

        Args:
            rows: [W, E], expected in the step, by rank of origin and expert.
            slots: [W, E], the slot that serves each of them.
        """
        ranks = self._num_ranks
        assert rows.shape == slots.shape and len(rows) == ranks, (rows.shape, slots.shape, ranks)
        target, number = self._owner[slots], rows.ravel()
        hit = np.bincount(self._owner, -np.expm1(-np.bincount(slots.ravel(), number, self._num_slots)), ranks)
        pairs = np.arange(ranks)[:, None] * ranks + target
        sent = np.bincount(pairs.ravel(), number, ranks**2).reshape(ranks, ranks)
        flops = sent.sum(0) * self._size.flops
        busy = product_seconds(hit * self._size.expert_bytes, flops, self._ceilings, self._experts)
        return float((busy + self._links.seconds(rows, target, sent)).max()) + self._links.waiting_s

    def most_lost(self, before: np.ndarray, after: np.ndarray, *, rows: float, steps: int) -> float:
        """Return a bound on how much longer steps take with `after` than with `before`, whatever tokens choose.

        A rank's load is a sum over experts, and a token is at K different ones. So a token loads a rank more by the K
        experts that load it most more, at most. An expert that a rank did not have is read in every step, or once a
        row; of one that it serves r times as many rows of, the part that is hit grows by (r - 1) r^(-r / (r - 1)) at
        most. A token has at most one copy more in a domain. Experts are equally popular among the tokens of all ranks,
        which bring equally many; no rank holds an expert twice.

        Args:
            before, after: [W, E], the slot that serves each rank and expert.
            rows: of the layer in all steps together, at most.
            steps: at most.
        """
        was, now = self._owner[before], self._owner[after]  # [W, E]
        if (was == now).all():
            return 0.0
        tokens = rows / self._top_k
        share_was, share_now = self._shares(was), self._shares(now)
        more = share_now - share_was
        row_s = product_seconds(0.0, self._size.flops, self._ceilings, self._experts)
        load_s = self._most(more * row_s + self._links.rates(now) - self._links.rates(was))
        times = share_now / np.where(share_was > 0, share_was, 1.0)
        grown = np.maximum(times, 1.0 + 1e-9)
        grown = (grown - 1.0) * grown ** (-grown / (grown - 1.0))
        read = np.where(share_was > 0, grown, (share_now > 0).astype(float)).sum(1).max()
        reading = product_seconds(self._size.expert_bytes, 0.0, self._ceilings, self._experts)
        hit = min(steps * float(read), tokens * self._most(more))
        return tokens * (load_s + self._links.most_copies_s(was, now)) + hit * float(reading)

    def _shares(self, target: np.ndarray) -> np.ndarray:
        """Return the part of each expert's rows that each rank serves: [W, E] of the rank that serves whom."""
        shares: np.ndarray = (target[None] == np.arange(self._num_ranks)[:, None, None]).mean(1)
        return shares

    def _most(self, more: np.ndarray) -> float:
        """Return what a token brings a rank at most, of what a row of each expert does: [W, E]."""
        top = np.sort(np.maximum(more, 0.0), axis=1)[:, -self._top_k :]
        return float(top.sum(1).max())


def copies_to_domains(rows: np.ndarray, at: np.ndarray, num_domains: int, token: TokenRows) -> np.ndarray:
    """Return how many tokens of each rank are expected to have rows in each domain: [W, C].

    A token draws its top_groups groups by the rows of groups, and in each of them K / top_groups experts by theirs, all
    by themselves: it misses a domain with (sum over groups of share (1 - part of the group there)^(K / top_groups)) to
    the power of top_groups.

    Args:
        rows: [W, E] by rank of origin and expert.
        at: [W, E], the domain that each of them goes to.
        num_domains: C.
        token: K and groups.

    Example:
        >>> copies_to_domains(np.array([[2.0, 2.0]]), np.array([[0, 1]]), 2, TokenRows(top_k=2)).tolist()
        [[1.5, 1.5]]
    """
    num_ranks, num_experts = rows.shape
    groups = token.num_groups
    run = np.arange(num_ranks)[:, None] * groups + np.arange(num_experts) * groups // num_experts  # [W, E]
    there = np.bincount((run * num_domains + at).ravel(), rows.ravel(), num_ranks * groups * num_domains)
    there = there.reshape(num_ranks, groups, num_domains)
    of_group = there.sum(2)  # [W, G]
    total = of_group.sum(1, keepdims=True)
    share = of_group / np.where(total > 0, total, 1.0)
    elsewhere = np.maximum(0.0, 1.0 - there / np.where(of_group > 0, of_group, 1.0)[:, :, None])
    missed = (share[:, :, None] * elsewhere ** (token.top_k / token.top_groups)).sum(1)  # [W, C], by one group
    copies: np.ndarray = total / token.top_k * (1.0 - missed**token.top_groups)
    return copies


class _Links:
    """What ranks put on links in a dispatch and a combine, in seconds."""

    def __init__(self, row_bytes: int, ceilings: Ceilings, domains: Sequence[int], token: TokenRows) -> None:
        self._domain = np.unique(np.asarray(domains), return_inverse=True)[1]  # [W]
        self._inside = np.bincount(self._domain)  # [C]
        num_ranks, self._token = len(self._domain), token
        same = self._domain[:, None] == self._domain[None]
        self._near = same & ~np.eye(num_ranks, dtype=bool)
        self._far = ~same
        self._of_domain = (self._domain[:, None] == np.arange(len(self._inside))).astype(float)  # [W, C]
        self._near_s = row_bytes / ceilings.within.bandwidth
        self._far_s = row_bytes / ceilings.between.bandwidth
        self._spans = len(self._inside) > 1
        latency = (ceilings.between if self._spans else ceilings.within).latency
        self.waiting_s = EXCHANGES_A_LAYER * latency if num_ranks > 1 else 0.0

    def seconds(self, rows: np.ndarray, target: np.ndarray, sent: np.ndarray) -> np.ndarray:
        """Return the seconds of each rank [W], of rows and their target ranks [W, E]; `sent` adds them up [W, W]."""
        near = sent * self._near
        near_rows = near.sum(0) + near.sum(1)  # sent back, sent out
        if not self._spans:
            busy: np.ndarray = near_rows * self._near_s
            return busy
        if not self._token.together:
            crossing = sent @ self._of_domain
        else:
            crossing = copies_to_domains(rows, self._domain[target], len(self._inside), self._token)
            # The relay hands rows on to the ranks of its domain, and gets their answers.
            handed = (sent * self._far).sum(0) * (1.0 - 1.0 / self._inside[self._domain])
            near_rows += handed + self._mean_of_domain(handed)
        pairs = self._of_domain.T @ crossing  # [C, C], from and to
        np.fill_diagonal(pairs, 0.0)
        far_rows = (pairs.sum(0) + pairs.sum(1)) / self._inside
        everything: np.ndarray = near_rows * self._near_s + far_rows[self._domain] * self._far_s
        return everything

    def rates(self, target: np.ndarray) -> np.ndarray:
        """Return what a row of each expert puts on the links of each rank: [W, E] of the rank that serves whom [W, E].

        Ranks bring equally many rows. Copies of tokens to other domains are left out.
        """
        num_ranks = len(target)
        served = target[None] == np.arange(num_ranks)[:, None, None]  # [W, W, E]: by, whose
        near = (served & self._near[:, :, None]).sum(1) + self._near[np.arange(num_ranks)[:, None], target]
        far = np.zeros(target.shape)
        if self._spans and self._token.together:
            handed = (served & self._far[:, :, None]).sum(1) * (1.0 - 1.0 / self._inside[self._domain])[:, None]
            near = near + handed + self._mean_of_domain(handed)
        elif self._spans:
            leaves = self._domain[target] != self._domain[:, None]
            out = self._of_domain.T @ leaves  # [C, E]
            into = np.stack([(leaves & (self._domain[target] == c)).sum(0) for c in range(len(self._inside))])
            far = ((out + into) / self._inside[:, None])[self._domain]
        rates: np.ndarray = (near * self._near_s + far * self._far_s) / num_ranks
        return rates

    def most_copies_s(self, was: np.ndarray, now: np.ndarray) -> float:
        """Return how much longer copies of a token keep a rank's links busy, at most: [W, E] as for `rates`."""
        if not self._spans or not self._token.together:
            return 0.0
        there = self._domain[now][:, None] == np.arange(len(self._inside))[:, None]  # [W, C, E]
        newly = there & (self._domain[was] != self._domain[now])[:, None]
        pairs = self._of_domain.T @ newly.any(2) / len(now)  # [C, C], from and to
        np.fill_diagonal(pairs, 0.0)
        return float(((pairs.sum(0) + pairs.sum(1)) / self._inside).max()) * self._far_s

    def _mean_of_domain(self, values: np.ndarray) -> np.ndarray:
        """Return the mean over its domain for each rank: [W, ...] of [W, ...]."""
        mean: np.ndarray = ((self._of_domain / self._inside).T @ values)[self._domain]
        return mean
