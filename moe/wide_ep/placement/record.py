"""Which logical expert stands in which slot of which rank: the record that everybody else reads.

Not a policy (balanced.py, baselines.py and eplb.py decide), not a choice between replicas (quotas.py makes the tables).
Letters: L MoE layers (counted among MoE layers), E logical experts, P slots of the whole group, R replicas, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from .quotas import MOVES_PER_RANK, choose_replicas

if TYPE_CHECKING:
    import torch  # only layers need it; who plans or balances does without


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertPlacement:
    """Expert slots of one group. Slots are numbered over all ranks; rank r owns the range `slot_ranges[r]`.

    Attributes:
        physical_to_logical: [L, P] i32.
        logical_to_physical: [L, E, R] i32, ascending, padded with -1.
        num_replicas: [L, E] i32.
        slot_ranges: (start, stop) of each rank, ascending and without gaps; a rank may own none.
        domains: the domain (NVLink domain or host) of each rank; empty when all ranks share one.
        load: [L, E] tokens that each expert is expected to get, by which replicas share them; None: not known.
    """

    physical_to_logical: np.ndarray
    logical_to_physical: np.ndarray
    num_replicas: np.ndarray
    slot_ranges: tuple[tuple[int, int], ...]
    domains: tuple[int, ...] = ()
    load: np.ndarray | None = None
    _tables: dict[tuple[int, int, torch.device], torch.Tensor | None] = field(
        default_factory=dict, init=False, repr=False
    )

    def __post_init__(self) -> None:
        assert self.slot_ranges[0][0] == 0
        assert all(a[1] == b[0] for a, b in zip(self.slot_ranges, self.slot_ranges[1:]))
        assert self.slot_ranges[-1][1] == self.num_slots, (self.slot_ranges, self.physical_to_logical.shape)
        assert not self.domains or len(self.domains) == self.num_ranks, (self.domains, self.num_ranks)

    @property
    def num_slots(self) -> int:
        """P, slots of the whole group."""
        return int(self.physical_to_logical.shape[1])

    @property
    def num_experts(self) -> int:
        """E, logical experts of a layer."""
        return int(self.logical_to_physical.shape[1])

    @property
    def num_layers(self) -> int:
        """L, MoE layers."""
        return int(self.physical_to_logical.shape[0])

    @property
    def num_ranks(self) -> int:
        """W, ranks of the group."""
        return len(self.slot_ranges)

    @cached_property
    def slot_rank(self) -> np.ndarray:
        """[P] i64, the rank that owns each slot."""
        return np.repeat(np.arange(self.num_ranks), [stop - start for start, stop in self.slot_ranges])

    @cached_property
    def rank_domain(self) -> np.ndarray:
        """[W] i64, the domain of each rank."""
        return np.array(self.domains or [0] * self.num_ranks, np.int64)

    @cached_property
    def slot_of(self) -> np.ndarray:
        """[L, W, E] i32, the slot that each rank uses for each expert; -1 for an expert without an owner."""
        tables = np.empty((self.num_layers, self.num_ranks, self.num_experts), np.int32)
        for layer, slots in enumerate(self.logical_to_physical):
            load = None if self.load is None else self.load[layer]
            tables[layer] = choose_replicas(slots, self.slot_rank, self.rank_domain, load)
        return tables

    def with_layers(
        self,
        physical_to_logical: np.ndarray,
        load: np.ndarray,
        layers: Sequence[int],
        *,
        moves_per_rank: int = MOVES_PER_RANK,
    ) -> ExpertPlacement:
        """Return it with other experts in the slots of some layers, whose replicas are shared out by another load.

        Args:
            physical_to_logical: [L, P] i32; equal to what stands in layers that are not named.
            load: [L, E], read in `layers`.
            layers: which change; nothing is worked out again for the others.
            moves_per_rank: as in `choose_replicas`.
        """
        known = np.zeros((self.num_layers, self.num_experts)) if self.load is None else self.load.astype(np.float64)
        known[layers] = load[layers]
        after = placement_of(
            physical_to_logical, self.num_experts, self.slot_ranges, domains=self.domains, load=known
        )  # fmt: skip
        tables = self.slot_of.copy()
        for layer in layers:
            slots = after.logical_to_physical[layer]
            tables[layer] = choose_replicas(
                slots, self.slot_rank, self.rank_domain, known[layer], moves_per_rank=moves_per_rank
            )
        after.__dict__["slot_of"] = tables  # where the cached property keeps it
        return after

    def num_local_slots(self, rank: int) -> int:
        """Slots that `rank` owns in every layer."""
        start, stop = self.slot_ranges[rank]
        return stop - start

    def local_experts(self, rank: int, layer: int = 0) -> np.ndarray:
        """Return the logical expert of each slot of `rank` in MoE layer number `layer`: [P_local] i32."""
        start, stop = self.slot_ranges[rank]
        return self.physical_to_logical[layer, start:stop]

    def table(self, layer: int, rank: int, device: torch.device) -> torch.Tensor | None:
        """Return `replica_table` on `device`, made once; None when it changes no id."""
        key = (layer, rank, device)
        if key not in self._tables:
            table = replica_table(self, layer, rank)
            is_identity = table[:-1].tolist() == list(range(len(table) - 1))
            self._tables[key] = None if is_identity else table.to(device)
        return self._tables[key]


def placement_of(
    physical_to_logical: np.ndarray,
    num_experts: int,
    slot_ranges: tuple[tuple[int, int], ...],
    *,
    domains: tuple[int, ...] = (),
    load: np.ndarray | None = None,
) -> ExpertPlacement:
    """Return the record of slots that a policy has filled.

    Args:
        physical_to_logical: [L, P] i32, the expert of each slot.
        num_experts: E; an expert that stands in no slot has no owner.
        slot_ranges, domains, load: as `ExpertPlacement` has them.

    Example:
        >>> placement_of(np.array([[0, 1, 1, 2]]), 3, ((0, 2), (2, 4))).logical_to_physical.tolist()
        [[[0, -1], [1, 2], [3, -1]]]
    """
    slots = np.asarray(physical_to_logical, np.int32)
    num_layers, num_slots = slots.shape
    num_replicas = np.zeros((num_layers, num_experts), np.int32)
    np.add.at(num_replicas, (np.arange(num_layers)[:, None], slots), 1)
    most = max(1, int(num_replicas.max(initial=0)))
    where = np.full((num_layers, num_experts, most), -1, np.int32)
    for layer in range(num_layers):
        order = np.argsort(slots[layer], kind="stable")  # slots by expert, ascending within one
        experts = slots[layer][order]
        first = np.searchsorted(experts, experts)  # where the run of each expert begins
        where[layer, experts, np.arange(num_slots) - first] = order
    return ExpertPlacement(
        physical_to_logical=slots,
        logical_to_physical=where,
        num_replicas=num_replicas,
        slot_ranges=slot_ranges,
        domains=domains,
        load=load,
    )


def replica_table(placement: ExpertPlacement, layer: int, rank: int) -> torch.Tensor:
    """Return the slot that `rank` uses for each logical expert: [E + 1] i32, -1 for an expert without an owner.

    The last entry is -1, so that indexing with the id -1 of a dropped choice yields -1.
    """
    import torch

    return torch.from_numpy(np.append(placement.slot_of[layer, rank], np.int32(-1)))


def assign_replicas(topk_ids: torch.Tensor, placement: ExpertPlacement, layer: int, rank: int) -> torch.Tensor:
    """Turn logical experts into slots: a replica on the same rank, else in the same domain, else by quotas.

    Replicas hold the same weights, so which of them computes a row changes no bit of it.

    Args:
        topk_ids: [T, K] i32, -1 for a dropped choice.
        placement: of the group.
        layer: MoE layer number, counted among MoE layers.
        rank: whose tokens these are.

    Returns:
        physical_ids [T, K] i32; -1 stays -1.

    Example:
        With expert 0 in slots 0 (rank 0) and 4 (rank 1), rank 1 gets [0, 2, -1] -> [4, 2, -1].
    """
    return slots_of(topk_ids, placement.table(layer, rank, topk_ids.device))


def slots_of(topk_ids: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
    """Look experts [T, K] i32 up in a table of `ExpertPlacement`; -1 stays -1, and None changes no id."""
    return topk_ids if table is None else table[topk_ids.long()]
