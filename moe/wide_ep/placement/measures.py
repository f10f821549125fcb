"""What a placement does with given routing: rows of each rank, imbalance, copies of tokens by how far they go.

Not a policy and not telemetry: pure counting of recorded or synthetic choices.
Units: tokens, rows (one token for one expert), bytes. T tokens, K top-k, E experts, W ranks, L MoE layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .record import ExpertPlacement

_TOKENS_AT_ONCE = 8192


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What the tokens of one layer do under a placement.

    Attributes:
        num_tokens: T.
        rows: [W] i64, rows that each rank computes.
        copies_within: copies of tokens to another rank of their domain (one for all experts of a rank).
        copies_between: copies of tokens to ranks of other domains (one for all experts of a rank).
        domain_copies: copies of tokens when each other domain gets one (a hierarchical exchange).
        rows_between: rows computed in another domain than their token's.
    """

    num_tokens: int
    rows: np.ndarray
    copies_within: int
    copies_between: int
    domain_copies: int
    rows_between: int

    @property
    def imbalance(self) -> float:
        """Rows of the fullest rank / mean; 1.0 without rows."""
        return float(imbalance(self.rows))

    def bytes_between(self, row_bytes: int, *, hierarchical: bool = False) -> float:
        """Return bytes that cross domains for a token, both ways together.

        A flat exchange sends a copy to each rank and brings every row back; a hierarchical one sends a copy to each
        domain and brings one sum back.
        """
        both_ways = 2 * self.domain_copies if hierarchical else self.copies_between + self.rows_between
        return both_ways * row_bytes / max(1, self.num_tokens)


def imbalance(rows: np.ndarray) -> np.ndarray:
    """Return the greatest / the mean over ranks: [...] of rows [..., W]; 1.0 where there are none."""
    mean = rows.mean(-1)
    return np.where(mean > 0, rows.max(-1) / np.where(mean > 0, mean, 1), 1.0)


def expert_load(topk_ids: np.ndarray, num_experts: int) -> np.ndarray:
    """Return how often each expert was chosen: [..., E] i64 of ids [..., T, K], -1 for a dropped choice."""
    flat = topk_ids.reshape(-1, topk_ids.shape[-2] * topk_ids.shape[-1])
    load = np.stack([np.bincount(ids[ids >= 0], minlength=num_experts) for ids in flat])
    return load.reshape(*topk_ids.shape[:-2], num_experts)


def traffic(topk_ids: np.ndarray, placement: ExpertPlacement, layer: int, source: np.ndarray) -> Traffic:
    """Return what tokens do in one layer.

    Args:
        topk_ids: [T, K], -1 for a dropped choice.
        placement: of the group.
        layer: MoE layer number.
        source: [T], the rank of each token.
    """
    num_ranks, rank_domain = placement.num_ranks, placement.rank_domain
    num_domains = int(rank_domain.max()) + 1
    rows = np.zeros(num_ranks + 1, np.int64)
    within = between = domains = rows_between = 0
    for start in range(0, len(topk_ids), _TOKENS_AT_ONCE):
        ids, own = topk_ids[start : start + _TOKENS_AT_ONCE], source[start : start + _TOKENS_AT_ONCE]
        slots = placement.slot_of[layer][own[:, None], ids]
        ranks = np.where((ids >= 0) & (slots >= 0), placement.slot_rank[slots], num_ranks)  # [T, K]
        rows += np.bincount(ranks.ravel(), minlength=num_ranks + 1)
        token = np.arange(len(ids))
        hit = np.zeros((len(ids), num_ranks + 1), bool)
        hit[token[:, None], ranks] = True
        hit = hit[:, :-1]
        hit[token, own] = False
        same = rank_domain[None] == rank_domain[own][:, None]  # [T, W]
        within += int((hit & same).sum())
        between += int((hit & ~same).sum())
        to_domain = np.zeros((len(ids), num_domains), bool)
        where, rank = np.nonzero(hit & ~same)
        to_domain[where, rank_domain[rank]] = True
        domains += int(to_domain.sum())
        far = (ranks < num_ranks) & (np.append(rank_domain, -1)[ranks] != rank_domain[own][:, None])
        rows_between += int(far.sum())
    return Traffic(
        num_tokens=len(topk_ids),
        rows=rows[:-1],
        copies_within=within,
        copies_between=between,
        domain_copies=domains,
        rows_between=rows_between,
    )
