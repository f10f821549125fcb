"""Which logical expert stands in which slot of which rank.

Not a balancer (it will make placements) and not an exchange (it only knows slot numbers).
Letters: L MoE layers (counted among MoE layers), E logical experts, P slots of the whole group, R replicas, W ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from ...topologies import slot_ranges


@dataclass(frozen=True, kw_only=True)
class ExpertPlacement:
    """Expert slots of one group. Slots are numbered over all ranks; rank r owns the range `slot_ranges[r]`.

    Attributes:
        physical_to_logical: [L, P] i32.
        logical_to_physical: [L, E, R] i32, padded with -1.
        num_replicas: [L, E] i32.
        slot_ranges: (start, stop) of each rank, ascending and without gaps; a rank may own none.
    """

    physical_to_logical: np.ndarray
    logical_to_physical: np.ndarray
    num_replicas: np.ndarray
    slot_ranges: tuple[tuple[int, int], ...]
    _tables: dict[tuple[int, int, torch.device], torch.Tensor | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        assert self.slot_ranges[0][0] == 0
        assert all(a[1] == b[0] for a, b in zip(self.slot_ranges, self.slot_ranges[1:]))
        assert self.slot_ranges[-1][1] == self.num_slots, (self.slot_ranges, self.physical_to_logical.shape)

    @property
    def num_slots(self) -> int:
        """P, slots of the whole group."""
        return int(self.physical_to_logical.shape[1])

    @property
    def num_experts(self) -> int:
        """E, logical experts of a layer."""
        return int(self.logical_to_physical.shape[1])

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
            is_identity = torch.equal(table[:-1], torch.arange(len(table) - 1, dtype=torch.int32))
            self._tables[key] = None if is_identity else table.to(device)
        return self._tables[key]


def linear_placement(num_layers: int, num_experts: int, num_ranks: int) -> ExpertPlacement:
    """Place experts in order, as evenly as they divide, without replicas.

    Args:
        num_layers: MoE layers; 0 for a dense model.
        num_experts: E; 0 for a dense model.
        num_ranks: W.

    Raises:
        ValueError: there are more ranks than experts.

    Example:
        10 experts over 4 ranks: slots [0, 3), [3, 6), [6, 8), [8, 10).
    """
    if num_experts and num_ranks > num_experts:
        raise ValueError(
            f"EP={num_ranks} is more ranks than the model has experts ({num_experts}); use EP <= {num_experts}"
        )
    row = np.arange(num_experts, dtype=np.int32)
    return ExpertPlacement(
        physical_to_logical=np.tile(row, (num_layers, 1)),
        logical_to_physical=np.tile(row[:, None], (num_layers, 1, 1)),
        num_replicas=np.ones((num_layers, num_experts), np.int32),
        slot_ranges=slot_ranges(num_experts, num_ranks),
    )


def replica_table(placement: ExpertPlacement, layer: int, rank: int) -> torch.Tensor:
    """Return the slot that `rank` uses for each logical expert: [E + 1] i32, -1 for an expert without an owner.

    The last entry is -1, so that indexing with the id -1 of a dropped choice yields -1. Ranks take replicas in turn.
    """
    slots = placement.logical_to_physical[layer]  # [E, R]
    count = placement.num_replicas[layer]  # [E]
    pick = rank % np.maximum(count, 1)
    chosen = np.where(count > 0, slots[np.arange(len(count)), pick], -1)
    return torch.from_numpy(np.append(chosen, -1).astype(np.int32))


def assign_replicas(topk_ids: torch.Tensor, placement: ExpertPlacement, layer: int, rank: int) -> torch.Tensor:
    """Turn logical experts into slots.

    Args:
        topk_ids: [T, K] i32, -1 for a dropped choice.
        placement: of the group.
        layer: MoE layer number, counted among MoE layers.
        rank: whose tokens these are.

    Returns:
        physical_ids [T, K] i32; -1 stays -1.

    Example:
        With expert 0 in slots 0 and 4, rank 1 gets [0, 2, -1] -> [4, 2, -1].
    """
    table = placement.table(layer, rank, topk_ids.device)
    return topk_ids if table is None else table[topk_ids.long()]
