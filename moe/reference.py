"""What the experts of a rank must compute; wide_ep/exchanges/reference.py has how rows come to them and go home.

Not fast and not used at run time: loops over rows.
Suffixes: T tokens of a rank, D width, K top-k, M rows received by a rank, F expert width.
"""

from __future__ import annotations

import math

import torch

from ..quant import dense
from .activation import SILU, Activation
from .gated import ExpertWeights


def activation_reference(gate_F: torch.Tensor, up_F: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return [F] of one row, element by element in Python floats."""
    outputs = []
    for gate, up in zip(gate_F.tolist(), up_F.tolist(), strict=True):
        if activation.kind == "silu":
            outputs.append(gate / (1 + math.exp(-gate)) * up)
        else:
            gate, up = min(gate, activation.limit), min(max(up, -activation.limit), activation.limit)
            outputs.append(gate / (1 + math.exp(-activation.alpha * gate)) * (up + 1))
    return torch.tensor(outputs)


def grouped_ffn_reference(
    rows_MD: torch.Tensor, tokens_per_slot: torch.Tensor, weights: ExpertWeights, activation: Activation = SILU
) -> torch.Tensor:
    """Return [M, D]: each row through the FFN of its slot, in fp32, rounded once to the rows' dtype."""
    w13, w2 = dense(weights.w13, torch.float32).float(), dense(weights.w2, torch.float32).float()
    b13 = torch.zeros(w13.shape[:2]) if weights.b13 is None else weights.b13.float()
    b2 = torch.zeros(w2.shape[:2]) if weights.b2 is None else weights.b2.float()
    outputs = torch.zeros(rows_MD.shape, dtype=torch.float32)
    row = 0
    for slot, count in enumerate(tokens_per_slot.tolist()):
        for _ in range(count):
            gate_F, up_F = (w13[slot] @ rows_MD[row].float() + b13[slot]).chunk(2)
            outputs[row] = w2[slot] @ activation_reference(gate_F, up_F, activation) + b2[slot]
            row += 1
    return outputs.to(rows_MD.dtype)
