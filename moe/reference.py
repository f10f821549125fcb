"""What dispatch, experts, combine and the whole MoE layer must compute, seen from above all ranks.

Not fast and not used at run time: loops over tokens, inputs of all ranks as lists, no process group.
Suffixes: T tokens of a rank, D width, K top-k, M rows received by a rank, F expert width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..quant import dense
from .gated import SILU, Activation, ExpertWeights


class DispatchedReference(NamedTuple):
    """What arrived on one rank.

    Attributes:
        rows_MD: sorted by slot, then source rank, then token, then k.
        tokens_per_slot: [P_local] i64.
        origins: (rank, token, k) of each row.
    """

    rows_MD: torch.Tensor
    tokens_per_slot: torch.Tensor
    origins: list[tuple[int, int, int]]


def dispatch_reference(
    inputs_TD: Sequence[torch.Tensor],
    physical_ids_TK: Sequence[torch.Tensor],
    slot_ranges: Sequence[tuple[int, int]],
) -> list[DispatchedReference]:
    """Return what arrives on every rank when rank r sends `inputs_TD[r]` by `physical_ids_TK[r]`."""
    arrived = []
    for start, stop in slot_ranges:
        origins: list[tuple[int, int, int]] = []
        tokens_per_slot = []
        for slot in range(start, stop):
            before = len(origins)
            for rank, ids_TK in enumerate(physical_ids_TK):
                for token, ids in enumerate(ids_TK.tolist()):
                    origins += [(rank, token, k) for k, physical_id in enumerate(ids) if physical_id == slot]
            tokens_per_slot.append(len(origins) - before)
        rows = [inputs_TD[rank][token] for rank, token, _ in origins]
        rows_MD = torch.stack(rows) if rows else inputs_TD[0].new_empty(0, inputs_TD[0].shape[1])
        arrived.append(DispatchedReference(rows_MD, torch.tensor(tokens_per_slot, dtype=torch.int64), origins))
    return arrived


def combine_reference(
    outputs_MD: Sequence[torch.Tensor],
    topk_weights_TK: Sequence[torch.Tensor],
    dispatched: Sequence[DispatchedReference],
) -> list[torch.Tensor]:
    """Return [T, D] of every rank: sum over ascending k of weight * output, in fp32 from zero, rounded once."""
    at = {}
    for owner, arrival in enumerate(dispatched):
        for row, origin in enumerate(arrival.origins):
            at[origin] = outputs_MD[owner][row]
    combined = []
    for rank, weights_TK in enumerate(topk_weights_TK):
        total_TD = torch.zeros(weights_TK.shape[0], outputs_MD[0].shape[1])
        for token in range(weights_TK.shape[0]):
            for k in range(weights_TK.shape[1]):
                if (rank, token, k) in at:
                    product = at[rank, token, k].float() * weights_TK[token, k]
                    total_TD[token] = total_TD[token] + product
        combined.append(total_TD.to(outputs_MD[0].dtype))
    return combined


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
