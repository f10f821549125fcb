"""The weights that one rank holds, as tensors in the shapes that the decoder multiplies with.

Not modules and not a loader: `models.loading` fills these records, `models.decoder` reads them.
Letters: V vocabulary, D width, H query heads, Hkv KV heads, Dh head width, F FFN width, E experts, S local slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass

import torch

from ..moe.gated import ExpertWeights
from ..quant import Matrix, PackedTensor, QuantTensor


@dataclass(kw_only=True)
class DenseFFN:
    """A gated FFN: down(act(gate(x), up(x))).

    Attributes:
        w13: [2F, D], gate rows first, then up rows.
        w2: [D, F].
        b13: [2F].
        b2: [D].
    """

    w13: Matrix
    w2: Matrix
    b13: torch.Tensor | None = None
    b2: torch.Tensor | None = None


@dataclass(kw_only=True)
class MoEWeights:
    """What a MoE layer holds on this rank.

    Attributes:
        router: [E, D] in the activation dtype or fp32; logits are computed in fp32.
        experts: w13 [S, 2F, D] and w2 [S, D, F] of the local slots, in slot order, with b13 [S, 2F] and b2 [S, D].
        router_bias: [E], part of the logits.
        selection_bias: [E] f32, chooses experts but never weighs them.
        shared: the shared experts as one FFN.
        shared_gate: [1, D], scales the shared output by sigmoid(gate(x)).
    """

    router: torch.Tensor
    experts: ExpertWeights
    router_bias: torch.Tensor | None = None
    selection_bias: torch.Tensor | None = None
    shared: DenseFFN | None = None
    shared_gate: torch.Tensor | None = None


@dataclass(kw_only=True)
class LatentWeights:
    """Latent attention's projections up to scores and values; the output projection is the layer's `o`.

    Exactly one of `q` and `q_b` is set; `q_a` and `q_a_norm` go with `q_b`.

    Attributes:
        q: [H * (nope + rope), D], queries from the hidden state.
        q_a: [query_rank, D], q_a_norm: [query_rank], q_b: [H * (nope + rope), query_rank].
        kv_a: [kv_rank + rope, D], latent rows first.
        kv_a_norm: [kv_rank].
        kv_b_k: [H, nope, kv_rank], from the latent to the keys of each head; never quantised. Packed it is what queries
            are multiplied with, [H, kv_rank, nope].
        kv_b_v: [H, value, kv_rank], from the latent to the values of each head; never quantised.
        q_a_bias: [query_rank], kv_a_bias: [kv_rank + rope].
    """

    kv_a: Matrix
    kv_a_norm: torch.Tensor
    kv_b_k: torch.Tensor | PackedTensor
    kv_b_v: torch.Tensor | PackedTensor
    q: Matrix | None = None
    q_a: Matrix | None = None
    q_a_norm: torch.Tensor | None = None
    q_b: Matrix | None = None
    q_a_bias: torch.Tensor | None = None
    kv_a_bias: torch.Tensor | None = None


@dataclass(kw_only=True)
class LayerWeights:
    """One decoder layer; exactly one of `dense` and `moe` is set, and exactly one of `qkv` and `latent`.

    Attributes:
        input_norm: [D]; of the norm in front of attention, or behind it where the model norms what a block adds.
        input_norm_bias: [D].
        qkv: [(H + 2 * Hkv) * Dh, D], rows of q, then k, then v.
        qkv_bias: [(H + 2 * Hkv) * Dh].
        latent: what makes queries, keys and values where they come from a latent.
        o: [D, H * Dh], or [D, H * value] with a latent.
        o_bias: [D].
        q_norm: [Dh] for a norm over each head, [H * Dh] for one over all heads together.
        k_norm: [Dh] or [Hkv * Dh].
        sinks: [H] f32.
        post_attention_norm: [D]; of the norm in front of the FFN, or behind it where the model norms what a block adds.
        post_attention_norm_bias: [D].
    """

    input_norm: torch.Tensor
    o: Matrix
    post_attention_norm: torch.Tensor
    qkv: Matrix | None = None
    latent: LatentWeights | None = None
    input_norm_bias: torch.Tensor | None = None
    post_attention_norm_bias: torch.Tensor | None = None
    qkv_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    dense: DenseFFN | None = None
    moe: MoEWeights | None = None


@dataclass(kw_only=True)
class ModelWeights:
    """Everything that one rank holds.

    Attributes:
        embedding: [V, D].
        head: [V, D]; the very same tensor as `embedding` when tied.
        head_bias: [V].
        final_norm: [D].
        final_norm_bias: [D].
        layers: one record a decoder layer.
    """

    embedding: torch.Tensor | PackedTensor
    head: torch.Tensor | PackedTensor
    final_norm: torch.Tensor
    layers: list[LayerWeights]
    head_bias: torch.Tensor | None = None
    final_norm_bias: torch.Tensor | None = None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (path, tensor) of every tensor held, each once (a tied head is not repeated).

        A quantised matrix yields its data and its scales, a packed one what it holds.
        """
        return tensors_of(self)

    @property
    def num_bytes(self) -> int:
        """Exact bytes of all tensors held."""
        return sum(tensor.nbytes for _, tensor in self.tensors())


def tensors_of(node: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) of every tensor in a record, each once."""
    seen: set[int] = set()
    for path, tensor in _walk("", node):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield path, tensor


def bytes_by_kind(weights: ModelWeights) -> dict[str, int]:
    """Return the exact bytes held by `kind/format`: scales count to the format of what they scale; a tied head is none.

    Kinds: `attention`, `routed`, `shared`, `dense` (dense FFNs, routers, norms behind attention), `embedding`, `head`.

    Example:
        `{"attention/int8": 1088, "attention/bfloat16": 32, ...}`
    """
    sizes: dict[str, int] = {}

    def add(kind: str, *nodes: object) -> None:
        for node in nodes:
            for name, num_bytes in _formats(node):
                sizes[f"{kind}/{name}"] = sizes.get(f"{kind}/{name}", 0) + num_bytes

    add("embedding", weights.embedding)
    add("head", None if weights.head is weights.embedding else weights.head, weights.head_bias)
    add("dense", weights.final_norm, weights.final_norm_bias)
    for layer in weights.layers:
        for item in fields(layer):
            node = getattr(layer, item.name)
            if isinstance(node, MoEWeights):
                add("routed", node.experts)
                add("shared", node.shared, node.shared_gate)
                add("dense", node.router, node.router_bias, node.selection_bias)
            else:
                in_ffn = item.name == "dense" or item.name.startswith("post_attention")
                add("dense" if in_ffn else "attention", node)
    return sizes


def _formats(node: object) -> Iterator[tuple[str, int]]:
    if isinstance(node, torch.Tensor):
        yield str(node.dtype).removeprefix("torch."), node.nbytes
    elif isinstance(node, PackedTensor):
        yield "bfloat16" if node.format == "bf16" else node.format, node.num_bytes
    elif isinstance(node, QuantTensor):
        yield node.scheme.kind, node.num_bytes
    elif is_dataclass(node):
        for item in fields(node):
            yield from _formats(getattr(node, item.name))


def held_bytes(node: object) -> int:
    """Return the exact bytes of all tensors in a record (or of one); 0 for None."""
    return sum(tensor.nbytes for _, tensor in _walk("", node))


def _walk(path: str, node: object) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(node, torch.Tensor):
        yield path, node
    elif isinstance(node, list):
        for i, child in enumerate(node):
            yield from _walk(f"{path}.{i}", child)
    elif is_dataclass(node):
        for item in fields(node):
            yield from _walk(f"{path}.{item.name}" if path else item.name, getattr(node, item.name))
