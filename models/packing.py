"""Put the loaded matrices of a rank into the tiles of native kernels: those of `quant.linear`, experts and the head.

Not the packing itself (quant/packed.py, pack_codes.py) and not the quantising (quant/quantize.py): this says which
matrices. Of those that a checkpoint stores quantised, codes move and none changes. Norms, biases, routers, and an
embedding that is not also the head stay as stored. The factors of latent attention that are multiplied head by head
are packed, never quantised. Units: bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ..moe.gated import ExpertWeights
from ..quant import PackedTensor, QuantTensor, WeightScheme, down_scheme, head_scheme, num_bytes, pack
from ..quant.pack_codes import pack_codes
from ..quant.quantize import quantize
from .weights import LayerWeights, ModelWeights


@dataclass(frozen=True)
class _Place:
    """A matrix, and where it stands."""

    owner: object
    name: str
    gate_up: bool = False
    down_of_all: bool = False  # of an FFN that every token passes
    by_head: bool = False  # a matrix a head, which is not quantised
    transposed: bool = False  # rows are multiplied with its matrices the other way round

    @property
    def matrix(self) -> torch.Tensor | QuantTensor | None:
        found = getattr(self.owner, self.name)
        is_plain = isinstance(found, torch.Tensor) and found.dtype == torch.bfloat16
        return found if is_plain or isinstance(found, QuantTensor) else None

    @property
    def kind(self) -> str | None:
        found = self.matrix
        return found.scheme.kind if isinstance(found, QuantTensor) else None if found is None else "bf16"

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.matrix)

    def pack(self) -> PackedTensor:
        # Nothing else may hold the matrix: it is overwritten, or its memory is free before the next one is packed.
        found = getattr(self.owner, self.name)
        if isinstance(found, QuantTensor):
            packed = pack_codes(found, gate_up=self.gate_up, in_place=True)
        else:
            packed = pack(_transpose(found) if self.transposed else found, gate_up=self.gate_up, in_place=True)
        setattr(self.owner, self.name, packed)
        return packed

    def quantize(self, scheme: WeightScheme) -> None:
        if self.by_head:
            self.pack()
            return
        own = down_scheme(scheme) if self.down_of_all else scheme
        quantized = quantize(getattr(self.owner, self.name), own, gate_up=self.gate_up)
        setattr(self.owner, self.name, quantized)  # what it was made of is free, unless somebody else holds it


def packable_bytes(weights: ModelWeights) -> int:
    """Return the bytes of the matrices that `pack_weights` would pack."""
    return sum(place.num_bytes for place in _places(weights))


def pack_weights(weights: ModelWeights, on_packed: Callable[[int], None]) -> None:
    """Pack the matrices of `weights`, one after the other, in their own memory where their widths are whole tiles.

    Args:
        weights: in bf16 or quantised as stored, on the CPU; all tensors of it are of no use to others afterwards.
        on_packed: told the bytes that each matrix had, when it is done.
    """
    tied = weights.head is weights.embedding
    for place in _places(weights):
        if place.matrix is None:
            continue
        num_bytes = place.num_bytes
        if place.owner is weights and tied:  # or the table would keep the memory of a head that is not packed in place
            weights.embedding = place.pack()
        else:
            place.pack()
        on_packed(num_bytes)


def quantize_layer(layer: LayerWeights, scheme: WeightScheme, on_packed: Callable[[int], None]) -> None:
    """Quantise the matrices of `layer`, or pack them, one after the other; for arguments see `pack_weights`."""
    for place in _layer_places(layer):
        if place.matrix is not None:
            num_bytes = place.num_bytes
            place.quantize(scheme)
            on_packed(num_bytes)


def pack_experts(experts: ExpertWeights, scheme: WeightScheme | None) -> None:
    """Make of read experts what `quantize_layer` (with a scheme) or `pack_weights` makes of them; see there."""
    for place in _ffn_places(experts, routed=True):
        if scheme is None:
            place.pack()
        else:
            place.quantize(scheme)


def quantize_head(weights: ModelWeights, on_packed: Callable[[int], None]) -> None:
    """Quantise the head; one that is also the embedding becomes a copy, whose rows stay as they are."""
    place = _Place(weights, "head")
    assert place.matrix is not None
    num_bytes = place.num_bytes
    place.quantize(head_scheme())
    on_packed(num_bytes)


def _places(weights: ModelWeights) -> Iterator[_Place]:
    for layer in weights.layers:
        yield from _layer_places(layer)
    yield _Place(weights, "head")


def _layer_places(layer: LayerWeights) -> Iterator[_Place]:
    yield _Place(layer, "qkv")
    yield _Place(layer, "o")
    if layer.latent is not None:
        for name in ("q", "q_a", "q_b", "kv_a"):
            yield _Place(layer.latent, name)
        yield _Place(layer.latent, "kv_b_k", by_head=True, transposed=True)
        yield _Place(layer.latent, "kv_b_v", by_head=True)
    yield from _ffn_places(layer.dense)
    if layer.moe is not None:
        yield from _ffn_places(layer.moe.experts, routed=True)
        yield from _ffn_places(layer.moe.shared)


def _ffn_places(ffn: object, *, routed: bool = False) -> Iterator[_Place]:
    both = _Place(ffn, "w13", gate_up=True), _Place(ffn, "w2", down_of_all=not routed)
    # One call runs both products, in one format: a quantised one beside a plain one stays with torch.
    if ffn is not None and both[0].kind is not None and both[0].kind == both[1].kind:
        yield from both


def _transpose(stack: torch.Tensor) -> torch.Tensor:
    """Return the matrices of `stack` [S, N, K] the other way round, [S, K, N], in the same memory."""
    turned = stack.transpose(1, 2).contiguous()
    return stack.view(turned.shape).copy_(turned)
