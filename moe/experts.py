"""The gated FFNs of the experts of one rank, over rows sorted by slot.

Not routing and no weights of tokens: rows come out unweighted, in the activation dtype, in the order they came in.
Letters: M rows, S slots of this rank, D width, F expert width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F


@dataclass(frozen=True, kw_only=True)
class Activation:
    """What stands between the two products of a gated FFN.

    Attributes:
        kind: `silu`: silu(gate) * up. `clamped`: gate is cut above `limit`, up to [-limit, limit], and the result is
            gate * sigmoid(alpha * gate) * (up + 1) (gpt-oss).
        alpha, limit: of `clamped`.
    """

    kind: str = "silu"
    alpha: float = 1.702
    limit: float = 7.0


SILU = Activation()


@dataclass(kw_only=True)
class ExpertWeights:
    """The experts of one layer that a rank holds, in slot order.

    Attributes:
        w13: [S, 2F, D], gate rows first, then up rows.
        w2: [S, D, F].
        b13: [S, 2F], gate first, then up; None where experts have no biases.
        b2: [S, D].
    """

    w13: torch.Tensor
    w2: torch.Tensor
    b13: torch.Tensor | None = None
    b2: torch.Tensor | None = None

    @property
    def bytes_per_slot(self) -> int:
        """Exact bytes of one expert."""
        parts = (t for t in (self.w13, self.w2, self.b13, self.b2) if t is not None)
        return sum(math.prod(t.shape[1:]) * t.element_size() for t in parts)

    @cached_property
    def has_grouped_product(self) -> bool:
        """True where torch multiplies all slots in one call: on a CPU, from 2.10 on, with rows of whole 16 bytes."""
        aligned = all(t.shape[2] * t.element_size() % 16 == 0 for t in (self.w13, self.w2))
        return hasattr(F, "grouped_mm") and self.w13.device.type == "cpu" and aligned


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up of rows that hold gate first, then up: [M, 2F] -> [M, F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def grouped_ffn(rows: torch.Tensor, tokens_per_slot: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
    """Run each row through the expert of its slot.

    One matrix product a slot that has rows; the weights of a slot without rows are not read. Every output row is
    written by exactly one product, so nothing uninitialised can come out.

    Args:
        rows: [M, D] sorted by slot.
        tokens_per_slot: [S] i64 on the CPU, sums to M.
        weights: the experts of the S slots.

    Returns:
        [M, D] in the dtype of `rows`, unweighted.

    Example:
        tokens_per_slot [2, 0, 1]: rows 0 and 1 go through expert 0, row 2 through expert 2.
    """
    assert len(tokens_per_slot) == weights.w13.shape[0], (tokens_per_slot.shape, weights.w13.shape)
    ends = tokens_per_slot.cumsum(0)
    assert int(ends[-1]) == rows.shape[0], (tokens_per_slot.tolist(), rows.shape)
    if not rows.shape[0]:
        return rows.new_empty(rows.shape)
    product = grouped_product if weights.has_grouped_product else product_per_slot
    hidden = swiglu(product(rows, ends, weights.w13))  # [M, F]
    return product(hidden, ends, weights.w2)


def grouped_product(rows: torch.Tensor, ends: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Return rows [M, in] times the transposed matrix of their slot [S, out, in], in one call: [M, out].

    `ends` [S] i64: slot s has the rows from ends[s - 1] (0 for the first) up to ends[s].
    """
    return F.grouped_mm(rows, matrices.transpose(1, 2), offs=ends.to(torch.int32))


def product_per_slot(rows: torch.Tensor, ends: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Return what `grouped_product` returns, with one call a slot that has rows; takes any width and any device."""
    output = rows.new_empty(rows.shape[0], matrices.shape[1])
    start = 0
    for slot, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(rows[start:end], matrices[slot].T, out=output[start:end])
        start = end
    return output
