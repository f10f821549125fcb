"""What all MoE layers of a rank read and multiply in a pass, from what each of them left behind.

Not the layer and not the counters (telemetry/counters.py); `models.pass_counts` counts what is around the layers.
Letters: L_moe MoE layers, S slots of this rank. Units: bytes as held; operations, a multiplication and an addition two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..telemetry import RankCounters
from .layer import MoELayer


class SlotCounts(NamedTuple):
    """Of all MoE layers in one pass.

    Attributes:
        tokens_per_slot: [L_moe, S] i64, rows that reached each slot. On a GPU they stay there until they are added up.
        read_again: [L_moe], slots whose weights were read a second time; None where none were.
    """

    tokens_per_slot: np.ndarray | torch.Tensor
    read_again: np.ndarray | torch.Tensor | None = None


class PassCounts:
    """Counts what a pass over all MoE layers of a rank reads and multiplies: rows per slot, and weights.

    Args:
        layers: all MoE layers of the rank, in order.
    """

    def __init__(self, layers: Sequence[MoELayer]) -> None:
        self._layers = layers
        self._bytes_per_slot = np.array([layer.bytes_per_slot for layer in layers])
        self._flops_per_row = np.array([float(layer.flops_per_row) for layer in layers])
        self._router_bytes = sum(layer.router_bytes for layer in layers)
        self._shared_bytes = sum(layer.shared_bytes for layer in layers)
        self._router_flops = sum(layer.router_flops for layer in layers)
        self._shared_flops = sum(layer.shared_flops for layer in layers)

    def left(self) -> SlotCounts:
        """Return what the last call of each layer left, as a copy. The host does not wait for a GPU."""
        return SlotCounts(
            torch.stack([layer.tokens_per_slot for layer in self._layers]),
            torch.stack([layer.read_again for layer in self._layers]),
        )

    def add(self, counters: RankCounters, counts: SlotCounts, *, num_rows: int) -> None:
        """Count one pass, in which `num_rows` of this rank's own went through routers and shared experts.

        Where counts are on a GPU the host waits for that pass here.
        """
        tokens_per_slot = _on_host(counts.tokens_per_slot)
        counters.add_expert_tokens(tokens_per_slot)
        slots_hit = np.add.reduce(tokens_per_slot != 0, axis=1)
        if counts.read_again is not None:
            slots_hit += _on_host(counts.read_again)
        counters.add_bytes("routed", int(slots_hit @ self._bytes_per_slot))
        counters.add_flops("routed", float(tokens_per_slot.sum(axis=1) @ self._flops_per_row))
        if num_rows:
            counters.add_bytes("dense", self._router_bytes)
            counters.add_bytes("shared", self._shared_bytes)
            counters.add_flops("dense", num_rows * self._router_flops)
            counters.add_flops("shared", num_rows * self._shared_flops)


def _on_host(counts: np.ndarray | torch.Tensor) -> np.ndarray:
    return counts.cpu().numpy() if isinstance(counts, torch.Tensor) else counts
