"""What step times depend on of a model: its bytes by kind, the arithmetic of a token by kind, and how it routes.

Not a reader of configs (models/architecture.py) and not of weights: a plain record. Bytes of each kind are those of
`ModelFootprint`, so that plan and byte budget cannot disagree.
Units: numbers (elements of matrices, each one multiply-add a token), FLOPs, bytes, experts. All layers together unless
a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..footprint import ModelFootprint

# What a matrix product runs in. A weight of four bits is multiplied at the rate of fp8 or bf16 where a machine has no
# faster one (hardware.py).
BF16, FP8, FP4, INT8 = "bf16", "fp8", "fp4", "int8"
PRECISIONS = (BF16, FP8, FP4, INT8)
PAYLOAD_ITEMSIZES = {BF16: 2.0, FP8: 1 + 4 / 128, FP4: 0.5 + 1 / 16, INT8: 1 + 4 / 128}


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Arithmetic of attention itself in one cache group, of one query token against one token in KV.

    Attributes:
        decode_flops: 2 * H * (2 * head width) for heads; with latent KV, whose up-projections are folded into queries
            and outputs, 2 * H * (2 * latent rank + rope width) (DeepSeek-AI, 2024, arXiv 2405.04434, 2.1.2).
        prefill_flops: the same for heads; with latent KV K and V are made first: 2 * H * (nope + rope + value width).
    """

    decode_flops: int
    prefill_flops: int


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model as a planner sees it.

    Attributes:
        footprint: its bytes in the formats that it is planned in.
        attention_numbers: matrices of attention.
        dense_numbers: FFNs of dense layers.
        router_numbers: routers.
        shared_numbers: shared experts.
        expert_numbers: ONE routed expert of ONE layer.
        head_numbers: the output head.
        attention_precision, ffn_precision: what their products run in, as far as a machine can; routers and head run
            in bf16.
        score_precision: the same of attention over KV: fp8 where KV is stored so.
        row_bytes: what kernels write and read again of one row between products, all layers: residuals, norms, heads
            before and after attention, and inner and outer rows of experts.
        scores: for each cache group of the footprint.
        num_groups, top_groups: a token's experts stand in `top_groups` of `num_groups` runs of experts; 1 and 1 know
            no groups.
    """

    footprint: ModelFootprint
    attention_numbers: int
    dense_numbers: int
    router_numbers: int
    shared_numbers: int
    expert_numbers: int
    head_numbers: int
    attention_precision: str
    ffn_precision: str
    score_precision: str
    row_bytes: float
    scores: tuple[Scores, ...]
    num_groups: int = 1
    top_groups: int = 1

    def __post_init__(self) -> None:
        assert len(self.scores) == len(self.footprint.kv_groups)
        assert {self.attention_precision, self.ffn_precision, self.score_precision} <= set(PRECISIONS)

    @property
    def payload_itemsize(self) -> float:
        """Bytes of an element sent to experts: fp8 and int8 with an f32 a 128, nvfp4 with an fp8 a 16 of them."""
        return PAYLOAD_ITEMSIZES[self.ffn_precision]

    @property
    def active_numbers(self) -> int:
        """Numbers that a token is multiplied with."""
        routed = self.footprint.num_moe_layers * self.footprint.top_k * self.expert_numbers
        others = self.attention_numbers + self.dense_numbers + self.router_numbers + self.shared_numbers
        return others + routed + self.head_numbers

    @property
    def total_numbers(self) -> int:
        """Numbers of all matrices but the embedding."""
        routed = self.footprint.num_moe_layers * self.footprint.num_experts * self.expert_numbers
        others = self.attention_numbers + self.dense_numbers + self.router_numbers + self.shared_numbers
        return others + routed + self.head_numbers

    def possible_atp(self) -> tuple[int, ...]:
        """Return all numbers of ranks that can divide the heads, ascending."""
        return (1, *(atp for atp, _ in self.footprint.attention_shares))
