"""What an entry of the table of families says: names of fields, names of tensors, and the rules behind them.

Not the table (`families`) and not the parser (`config_json`): only the records and the layer rules that entries share.
Units: elements and layers; a width is a number of neurons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .json_fields import Fields

MAX_WIDTH, MAX_LAYERS = 1 << 20, 1024


def every_layer(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """All layers are MoE."""
    return tuple(range(num_layers))


def sparse_step(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Layers i with (i + 1) % decoder_sparse_step == 0 that mlp_only_layers does not name."""
    step = fields.integer("decoder_sparse_step", 1, MAX_LAYERS, default=1)
    dense = fields.integers("mlp_only_layers", 0, MAX_LAYERS, max_length=MAX_LAYERS)
    return tuple(i for i in range(num_layers) if (i + 1) % step == 0 and i not in dense)


def after_first_dense(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """All layers but the first first_k_dense_replace are MoE."""
    return tuple(range(fields.integer("first_k_dense_replace", 0, num_layers, default=1), num_layers))


@dataclass(frozen=True, kw_only=True)
class TensorNames:
    """How a family spells the tensors of its FFN blocks.

    Attributes:
        block: the MoE block inside a layer.
        projections: gate, up and down of an expert.
        shared: the shared expert inside the block.
        aliases: (other spelling, spelling used here) of parts of a name.
    """

    block: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str = "shared_expert"
    aliases: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class MoEFamily:
    """How a family spells its experts.

    Attributes:
        num_experts / expert_width: names of the fields.
        layers: which layers are MoE, from the fields and the number of layers.
        scoring: see `RoutingConfig`.
        renormalize: name of the flag, or None when the weights of the chosen experts always sum to one.
        scaling_factor: name of the field, or None when there is none.
        shared_width: from the fields and the width of a routed expert to that of the shared one; None: there is none.
        shared_gate: the shared expert has a sigmoid gate.
        selection_bias: the router has a bias that only chooses.
        router_fp32: router matrices are kept in fp32 whatever the dtype of the model.
    """

    num_experts: str = "num_experts|num_local_experts"
    expert_width: str = "moe_intermediate_size"
    layers: Callable[[Fields, int], tuple[int, ...]] = every_layer
    scoring: str = "softmax"
    renormalize: str | None = "norm_topk_prob"
    scaling_factor: str | None = None
    shared_width: Callable[[Fields, int], int] | None = None
    shared_gate: bool = False
    selection_bias: bool = False
    router_fp32: bool = False


@dataclass(frozen=True, kw_only=True)
class Family:
    """One entry of the table.

    Attributes:
        architecture: the class name that config.json lists in `architectures`.
        moe: None for dense families.
        defaults: values of fields that config.json may leave out.
        qkv_bias / output_bias: names of the flags, or None when there is no such bias.
        qk_norm: `head` or `full` as in `ModelConfig`, the name of a flag that switches `head` on, or None.
        partial_rotary: only a part of each head may rotate.
        gated_window: `sliding_window` counts only when `use_sliding_window` is true.
        names: of tensors.
    """

    architecture: str
    moe: MoEFamily | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: str | None = None
    output_bias: str | None = None
    qk_norm: str | None = None
    partial_rotary: bool = False
    gated_window: bool = False
    names: TensorNames = TensorNames()
