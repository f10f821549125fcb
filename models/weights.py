"""The weights that one rank holds, as plain tensors in the shapes that the decoder multiplies with.

Not modules and not a loader: `models.loading` fills these records, `models.decoder` reads them.
Letters: V vocabulary, D width, H query heads, Hkv KV heads, Dh head width, F FFN width, E experts, S local slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass

import torch

from ..moe.experts import ExpertWeights


@dataclass(kw_only=True)
class DenseFFN:
    """A gated FFN: down(silu(gate(x)) * up(x)).

    Attributes:
        w13: [2F, D], gate rows first, then up rows.
        w2: [D, F].
    """

    w13: torch.Tensor
    w2: torch.Tensor


@dataclass(kw_only=True)
class MoEWeights:
    """What a MoE layer holds on this rank.

    Attributes:
        router: [E, D] in the activation dtype or fp32; logits are computed in fp32.
        experts: w13 [S, 2F, D] and w2 [S, D, F] of the local slots, in slot order.
        selection_bias: [E] f32, chooses experts but never weighs them.
        shared: the shared experts as one FFN.
        shared_gate: [1, D], scales the shared output by sigmoid(gate(x)).
    """

    router: torch.Tensor
    experts: ExpertWeights
    selection_bias: torch.Tensor | None = None
    shared: DenseFFN | None = None
    shared_gate: torch.Tensor | None = None


@dataclass(kw_only=True)
class LayerWeights:
    """One decoder layer; exactly one of `dense` and `moe` is set.

    Attributes:
        input_norm: [D].
        qkv: [(H + 2 * Hkv) * Dh, D], rows of q, then k, then v.
        qkv_bias: [(H + 2 * Hkv) * Dh].
        o: [D, H * Dh].
        o_bias: [D].
        q_norm: [Dh] for a norm over each head, [H * Dh] for one over all heads together.
        k_norm: [Dh] or [Hkv * Dh].
        post_attention_norm: [D].
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    post_attention_norm: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    dense: DenseFFN | None = None
    moe: MoEWeights | None = None


@dataclass(kw_only=True)
class ModelWeights:
    """Everything that one rank holds.

    Attributes:
        embedding: [V, D].
        head: [V, D]; the very same tensor as `embedding` when tied.
        final_norm: [D].
        layers: one record a decoder layer.
    """

    embedding: torch.Tensor
    head: torch.Tensor
    final_norm: torch.Tensor
    layers: list[LayerWeights]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (path, tensor) of every tensor held, each once (a tied head is not repeated)."""
        seen: set[int] = set()
        for path, tensor in _walk("", self):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield path, tensor

    @property
    def num_bytes(self) -> int:
        """Exact bytes of all tensors held."""
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.tensors())


def _walk(path: str, node: object) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(node, torch.Tensor):
        yield path, node
    elif isinstance(node, list):
        for i, child in enumerate(node):
            yield from _walk(f"{path}.{i}", child)
    elif is_dataclass(node):
        for item in fields(node):
            yield from _walk(f"{path}.{item.name}" if path else item.name, getattr(node, item.name))
