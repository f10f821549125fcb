"""The gated FFNs of the experts of one rank, over rows sorted by slot.

Not routing and no weights of tokens: rows come out unweighted, in the activation dtype, in the order they came in.
Letters: M rows, S slots of this rank, D width, F expert width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F


@dataclass(kw_only=True)
class ExpertWeights:
    """The experts of one layer that a rank holds, in slot order.

    Attributes:
        w13: [S, 2F, D], gate rows first, then up rows.
        w2: [S, D, F].
    """

    w13: torch.Tensor
    w2: torch.Tensor

    @property
    def bytes_per_slot(self) -> int:
        """Exact bytes of one expert."""
        return sum(t.shape[1] * t.shape[2] * t.element_size() for t in (self.w13, self.w2))

    @cached_property
    def transposed_slots(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views ([D, 2F], [F, D]) of each slot, made once; they follow changes of the tensors in place."""
        return list(zip(self.w13.transpose(1, 2).unbind(0), self.w2.transpose(1, 2).unbind(0)))


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up of rows that hold gate first, then up: [M, 2F] -> [M, F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def grouped_ffn(rows: torch.Tensor, tokens_per_slot: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
    """Run each row through the expert of its slot.

    One matrix product a slot that has rows; a slot without rows costs nothing and its weights are not read. Every
    output row is written by exactly one product, so nothing uninitialised can come out.

    Args:
        rows: [M, D] sorted by slot.
        tokens_per_slot: [S] i64 on the CPU, sums to M.
        weights: the experts of the S slots.

    Returns:
        [M, D] in the dtype of `rows`, unweighted.

    Example:
        tokens_per_slot [2, 0, 1]: rows 0 and 1 go through expert 0, row 2 through expert 2.
    """
    slots = weights.transposed_slots
    counts = tokens_per_slot.tolist()
    assert len(counts) == len(slots) and sum(counts) == rows.shape[0], (len(slots), counts, tuple(rows.shape))
    used = [slots[s] for s, count in enumerate(counts) if count]
    if not used:
        return rows.new_empty(rows.shape)
    sizes = [count for count in counts if count]
    gate_up = rows.new_empty(rows.shape[0], weights.w13.shape[1])  # [M, 2F]
    for (w13, _), piece, out in zip(used, rows.split_with_sizes(sizes), gate_up.split_with_sizes(sizes)):
        torch.mm(piece, w13, out=out)
    hidden = swiglu(gate_up)  # [M, F]
    output = torch.empty_like(rows)
    for (_, w2), piece, out in zip(used, hidden.split_with_sizes(sizes), output.split_with_sizes(sizes)):
        torch.mm(piece, w2, out=out)
    return output
