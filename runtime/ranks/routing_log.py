"""What the routers of a rank chose, step by step, until it is a trace: decode and prefill apart, bounded.

Not a counter (telemetry) and not the file (moe.wide_ep.traces). One thread uses it, that of the rank.
Shapes: ids [T, K]. L MoE layers, T rows of a step, K top-k.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...moe.wide_ep.traces import PHASES, RoutingTrace


class RoutingLog:
    """Collects choices.

    Args:
        num_layers: L.
        num_experts: E.
        num_groups: of the router, 1 where it knows none.
        most_tokens: kept of each phase; later ones are counted only.

    Attributes:
        dropped: tokens that were not kept.
    """

    def __init__(self, num_layers: int, num_experts: int, *, num_groups: int = 1, most_tokens: int) -> None:
        self._num_layers, self._num_experts, self._num_groups = num_layers, num_experts, num_groups
        self._most = most_tokens
        self._step: dict[int, np.ndarray] = {}
        self._kept: dict[str, list[np.ndarray]] = {phase: [] for phase in PHASES}
        self._counts = dict.fromkeys(PHASES, 0)
        self.dropped = 0

    def observe(self, moe_layer: int, topk_ids: Any) -> None:
        """Take the choices of one layer: a tensor [T, K] that may be written to afterwards."""
        self._step[moe_layer] = np.array(topk_ids.cpu().numpy(), np.int16 if self._num_experts < 1 << 15 else np.int32)

    def end_step(self, num_decodes: int, *, keep: bool) -> None:
        """Keep what the layers of a step chose, or forget it; its first `num_decodes` rows decode."""
        step, self._step = self._step, {}
        if not (keep and step):
            return
        ids = np.stack([step[layer] for layer in range(self._num_layers)])  # [L, T, K]
        for phase, rows in (("decode", ids[:, :num_decodes]), ("prefill", ids[:, num_decodes:])):
            room = self._most - self._counts[phase]
            self.dropped += max(0, rows.shape[1] - room)
            rows = rows[:, :room]
            if rows.shape[1]:
                self._kept[phase].append(rows)
                self._counts[phase] += rows.shape[1]

    def trace(self) -> RoutingTrace:
        """Return what was kept.

        Raises:
            ValueError: nothing was.
        """
        ids = {phase: np.concatenate(kept, axis=1).astype(np.int32) for phase, kept in self._kept.items() if kept}
        return RoutingTrace(num_experts=self._num_experts, num_groups=self._num_groups, ids=ids)
