"""Every launch that a MoE layer of a model makes, from shapes alone: to compile them before they are needed.

Tensors are of device `meta`, which has no memory. Not a model's config (models/) and nothing that runs.
Letters: T tokens, D width, F expert width, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from ...native.gpu import GpuKernels, GpuTarget, Launch
from ...quant import FP8_BLOCK, INT4_GROUP, INT8_BLOCK, MXFP4_SCHEME, Matrix, QuantScheme, QuantTensor
from ..activation import SILU, Activation
from ..gated import ExpertWeights
from ..routing import RoutingConfig
from .combine import ExpertRows, combine_launch
from .expert_tiles import every_size
from .experts import ffn_launches, ffn_products
from .permute import permute_launches
from .route import route_launch
from .route_permute import fits_one_program, route_permute_launch
from .router import router_launch
from .row_tiles import empty_tiles

_ALL = 1 << 30  # rows or columns of a block that is the whole matrix
PLAIN = "bf16"
SCALE_A_PART = "fp8 tensor"  # of matrices that are stored side by side each has its own
MANY_TOKENS = 8192  # so many that they are sorted in two launches
# Formats of experts by name: the scheme, and whether codes have zero points.
FORMATS: dict[str, tuple[QuantScheme, bool]] = {
    SCALE_A_PART: (QuantScheme(kind=FP8_BLOCK, block=(_ALL, _ALL)), False),
    "fp8 channel": (QuantScheme(kind=FP8_BLOCK, block=(1, _ALL)), False),
    "fp8 128x128": (QuantScheme(kind=FP8_BLOCK, block=(128, 128)), False),
    "int8 channel": (QuantScheme(kind=INT8_BLOCK, block=(1, _ALL)), False),
    "int4 32": (QuantScheme(kind=INT4_GROUP, block=(1, 32)), True),
    "int4 64": (QuantScheme(kind=INT4_GROUP, block=(1, 64)), True),
    "int4 128": (QuantScheme(kind=INT4_GROUP, block=(1, 128)), True),
    "int4 128 symmetric": (QuantScheme(kind=INT4_GROUP, block=(1, 128)), False),
    "mxfp4": (MXFP4_SCHEME, False),
}


@dataclass(frozen=True, kw_only=True)
class MoEShapes:
    """What of a model its MoE kernels depend on.

    Attributes:
        width: D.
        ffn_width: F.
        routing: E and K among it; a rank may hold fewer experts than E.
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

    def experts(self, format_name: str, num_slots: int = 0) -> ExpertWeights:
        """Return so many experts in a format; 0: all of them."""
        num_slots, width, ffn_width = num_slots or self.routing.num_experts, self.width, self.ffn_width
        biases = [torch.empty(num_slots, n, dtype=self.dtype, device="meta") for n in (2 * ffn_width, width)]
        return ExpertWeights(
            w13=stacked_matrices(format_name, (num_slots, 2 * ffn_width, width), (ffn_width, ffn_width), self.dtype),
            w2=stacked_matrices(format_name, (num_slots, width, ffn_width), (width,), self.dtype),
            b13=biases[0] if self.has_biases else None,
            b2=biases[1] if self.has_biases else None,
        )


def stacked_matrices(
    name: str, shape: tuple[int, int, int], sections: tuple[int, ...], dtype: torch.dtype = torch.bfloat16
) -> Matrix:
    """Return matrices [S, N, K] without memory in a format of FORMATS, or in `dtype` where it is PLAIN.

    `sections` are the outputs of parts that are quantised each by itself; they add up to N.
    """
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


def moe_launches(shapes: MoEShapes, target: GpuTarget, token_counts: Iterable[int] | None = None) -> Iterator[Launch]:
    """Yield every launch of one layer that differs in its code.

    Args:
        shapes: of the layer.
        target: the GPU.
        token_counts: numbers of tokens on a rank that holds all experts; None: any number of tokens, and of experts.
    """
    routing = shapes.routing
    bias = torch.empty(routing.num_experts, device="meta")
    router = torch.empty(routing.num_experts, shapes.width, device="meta")
    yield router_launch(shapes.rows(1), router, bias if shapes.has_biases else None)[0]
    yield from choice_launches(routing, bias if shapes.has_selection_bias else None)
    for format_name in shapes.formats:
        yield from _expert_launches(shapes, format_name, target, token_counts)
    rows, weights = shapes.rows(routing.top_k), torch.empty(1, routing.top_k, device="meta")
    for added in (shapes.rows(1), None):
        row_of = torch.empty(1, routing.top_k, dtype=torch.int32, device="meta")
        yield combine_launch(ExpertRows(rows, weights, row_of, added))[0]


def choice_launches(
    routing: RoutingConfig, selection_bias: torch.Tensor | None, token_counts: Iterable[int] = (1, 2, MANY_TOKENS)
) -> Iterator[Launch]:
    """Yield the choice of experts, in one launch or in several, and sorting alone, as a rank with some of them does.

    By default for numbers of tokens between which nothing but grids changes.
    """
    num_experts = routing.num_experts
    slot_of = torch.empty(num_experts + 1, dtype=torch.int32, device="meta")
    counts, num_filled = (torch.empty(size, dtype=torch.int64, device="meta") for size in (num_experts, 1))
    for num_tokens in token_counts:
        logits = torch.empty(num_tokens, num_experts, device="meta")
        cut = empty_tiles(num_tokens * routing.top_k, num_experts, 16, logits.device)
        for filled in (None, num_filled):
            route, _, slot_ids = route_launch(logits, routing, selection_bias, slot_of, filled)
            yield route
            if fits_one_program(num_tokens, routing):
                yield route_permute_launch(
                    logits, routing, selection_bias, slot_of, counts=counts, cut=cut, num_filled=filled
                )[0]
        yield from permute_launches(slot_ids, num_experts, cut=cut)[0]
        for num_slots in _slot_counts(num_experts):
            yield from permute_launches(slot_ids, num_slots)[0]


def _expert_launches(
    shapes: MoEShapes, format_name: str, target: GpuTarget, token_counts: Iterable[int] | None
) -> Iterator[Launch]:
    if token_counts is None:
        sizes = {(1, number) for number in _slot_counts(shapes.routing.num_experts)}
        for product in ffn_products(shapes.experts(format_name), target):
            sizes |= {(size.rows, size.slots) for size in every_size(product, target)}
    else:
        sizes = {(number * shapes.routing.top_k, shapes.routing.num_experts) for number in token_counts}
    for fixed, chosen in ((False, sorted(sizes)), (True, [(1, 1)])):
        for num_rows, num_slots in chosen:
            counts = torch.empty(num_slots, dtype=torch.int64, device="meta")
            yield from ffn_launches(
                shapes.rows(1), counts, shapes.experts(format_name, num_slots), shapes.activation,
                kernels=GpuKernels(target=target, batch_invariant=fixed),
                row_tokens=counts.new_empty(num_rows, dtype=torch.int32),
            )[0]  # fmt: skip


def _slot_counts(num_experts: int) -> list[int]:
    """Return numbers of slots that a rank of 1, 2, 4, .. may have: all that kernels are compiled for."""
    return [num_experts >> shift for shift in range(num_experts.bit_length())]
