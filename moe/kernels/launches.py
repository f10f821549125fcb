"""Every launch that a MoE layer of a model makes, from shapes alone: to compile them before they are needed.

Tensors are of device `meta`, which has no memory. Not a model's config (models/) and nothing that runs.
Letters: T tokens, D width, F expert width, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...native.gpu import GpuTarget, Launch
from ...quant import FP8_BLOCK, INT4_GROUP, INT8_BLOCK, MXFP4_SCHEME, Matrix, QuantScheme, QuantTensor
from ..activation import SILU, Activation
from ..gated import ExpertWeights
from ..routing import RoutingConfig
from .combine import ExpertRows, combine_launch
from .experts import ffn_launches
from .permute import permute_launches
from .route import route_launch
from .route_permute import fits_one_program, route_permute_launch
from .router import MOST_ROWS, router_launch
from .row_tiles import empty_tiles

_ALL = 1 << 30  # rows or columns of a block that is the whole matrix
PLAIN = "bf16"
# Formats of experts by name: the scheme, and whether codes have zero points.
FORMATS: dict[str, tuple[QuantScheme, bool]] = {
    "fp8 tensor": (QuantScheme(kind=FP8_BLOCK, block=(_ALL, _ALL)), False),
    "fp8 channel": (QuantScheme(kind=FP8_BLOCK, block=(1, _ALL)), False),
    "fp8 128x128": (QuantScheme(kind=FP8_BLOCK, block=(128, 128)), False),
    "int8 channel": (QuantScheme(kind=INT8_BLOCK, block=(1, _ALL)), False),
    "int4 32": (QuantScheme(kind=INT4_GROUP, block=(1, 32)), True),
    "int4 128": (QuantScheme(kind=INT4_GROUP, block=(1, 128)), True),
    "mxfp4": (MXFP4_SCHEME, False),
}


@dataclass(frozen=True, kw_only=True)
class MoEShapes:
    """What of a model its MoE kernels depend on.

    Attributes:
        width: D.
        ffn_width: F.
        routing: E and K among it; a rank may hold fewer experts than E, which changes no kernel.
        has_selection_bias: of the router.
        activation: of experts.
        has_biases: of experts.
        formats: of experts, PLAIN or names of FORMATS.
        dtype: of activations.
    """

    width: int
    ffn_width: int
    routing: RoutingConfig
    has_selection_bias: bool = False
    activation: Activation = SILU
    has_biases: bool = False
    formats: tuple[str, ...] = (PLAIN,)
    dtype: torch.dtype = torch.bfloat16

    def rows(self, number: int) -> torch.Tensor:
        """Return [number, D] activations."""
        return torch.empty(number, self.width, dtype=self.dtype, device="meta")

    def experts(self, format_name: str) -> ExpertWeights:
        """Return all experts in a format."""
        size, width, ffn_width = self.routing.num_experts, self.width, self.ffn_width
        biases = [torch.empty(size, n, dtype=self.dtype, device="meta") for n in (2 * ffn_width, width)]
        return ExpertWeights(
            w13=_matrix(format_name, (size, 2 * ffn_width, width), (ffn_width, ffn_width), self.dtype),
            w2=_matrix(format_name, (size, width, ffn_width), (width,), self.dtype),
            b13=biases[0] if self.has_biases else None,
            b2=biases[1] if self.has_biases else None,
        )


def _matrix(name: str, shape: tuple[int, int, int], sections: tuple[int, ...], dtype: torch.dtype) -> Matrix:
    if name == PLAIN:
        return torch.empty(shape, dtype=dtype, device="meta")
    scheme, has_zeros = FORMATS[name]
    (slots, rows, columns), block = shape, scheme.block
    fitted = QuantScheme(kind=scheme.kind, block=(min(block[0], max(sections)), min(block[1], columns)))
    parts = [fitted.scales_shape(section, columns) for section in sections]
    scales_shape = (slots, sum(part[0] for part in parts), parts[0][1])
    data_dtype = {FP8_BLOCK: torch.float8_e4m3fn, INT8_BLOCK: torch.int8}.get(scheme.kind, torch.uint8)
    scale_dtype = {MXFP4_SCHEME.kind: torch.uint8, INT4_GROUP: torch.float16}.get(scheme.kind, torch.float32)
    zeros = torch.empty(scales_shape, dtype=torch.uint8, device="meta") if has_zeros else None
    return QuantTensor(
        data=torch.empty(slots, *fitted.data_shape(rows, columns), dtype=data_dtype, device="meta"),
        scales=torch.empty(scales_shape, dtype=scale_dtype, device="meta"),
        scheme=fitted, shape=shape, sections=sections, zeros=zeros,
    )  # fmt: skip


def moe_launches(shapes: MoEShapes, num_tokens: int, target: GpuTarget) -> Iterator[Launch]:
    """Yield the launches of one layer with `num_tokens` rows on one rank."""
    routing = shapes.routing
    logits, bias = (torch.empty(*size, routing.num_experts, device="meta") for size in ((num_tokens,), ()))
    slot_of = torch.empty(routing.num_experts + 1, dtype=torch.int32, device="meta")
    selection_bias = bias if shapes.has_selection_bias else None
    num_filled = torch.empty(1, dtype=torch.int64, device="meta")
    yield route_launch(logits, routing, selection_bias, slot_of)[0]
    route, chosen, slot_ids = route_launch(logits, routing, selection_bias, slot_of, num_filled)
    yield route
    permute, permuted = permute_launches(slot_ids, routing.num_experts)
    yield from permute
    cut = empty_tiles(slot_ids.numel(), routing.num_experts, 16, logits.device)
    yield from permute_launches(slot_ids, routing.num_experts, cut=cut)[0]
    if fits_one_program(num_tokens, routing):
        for filled in (None, num_filled):
            yield route_permute_launch(
                logits, routing, selection_bias, slot_of, counts=permuted.tokens_per_slot, cut=cut, num_filled=filled
            )[0]
    if num_tokens <= MOST_ROWS:
        router = torch.empty(routing.num_experts, shapes.width, device="meta")
        yield router_launch(shapes.rows(num_tokens), router, bias if shapes.has_biases else None)[0]
    x, shared = shapes.rows(num_tokens), shapes.rows(num_tokens)
    for format_name in shapes.formats:
        experts = shapes.experts(format_name)
        launches, rows = ffn_launches(
            x, permuted.tokens_per_slot, experts, shapes.activation, target=target, row_tokens=permuted.row_tokens
        )
        yield from launches
        if format_name == PLAIN:
            yield from ffn_launches(
                x, permuted.tokens_per_slot, experts, shapes.activation, target=target,
                row_tokens=permuted.row_tokens, batch_invariant=True,
            )[0]  # fmt: skip
    for added in (shared, None):
        yield combine_launch(ExpertRows(rows, chosen.topk_weights, permuted.rows, added))[0]
