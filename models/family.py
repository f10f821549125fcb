"""What an entry of the table of families says: names of fields, and the rules behind them.

Not the table (`families`), not the parser (`config_json`) and no names of tensors.
Units: elements and layers; a width is a number of neurons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..moe.activation import SILU, Activation
from .json_fields import Fields
from .layer_rules import AttentionLayers, MoELayers, every_layer, full_attention

MAX_WIDTH = 1 << 20
# The fields and the width of a routed expert -> width of the shared one as one FFN.
SharedWidth = Callable[[Fields, int], int]
# A switch: the same for all models of a family, or the name of the flag.
Switch = bool | str


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Expert groups: `count` equal runs of experts, of which a token takes its `chosen` best."""

    count: int = 1
    chosen: int = 1


@dataclass(frozen=True, kw_only=True)
class MoEFamily:
    """How a family spells its experts.

    Attributes:
        num_experts / top_k / expert_width: names of the fields.
        layers: which layers are MoE, from the fields and the number of layers.
        scoring: see `RoutingConfig`.
        renormalize: the weights of the chosen experts are divided by their sum.
        min_weight_sum: name of the field with the least sum to divide by, or None.
        scaling_factor: name of the field, or None when there is none.
        groups: of experts, from the fields; None where there are none.
        group_score: see `RoutingConfig`.
        jitter: name of the field, for `sparsemixer`.
        activation: from the fields.
        shared_width: from the fields and the width of a routed expert to that of the shared one; None: there is none.
        shared_gate: the shared expert has a sigmoid gate.
        shared_bias / router_bias / expert_bias: there are such biases.
        selection_bias: the router has a bias that only chooses.
        weigh_input: see `MoEConfig`; a token has one expert.
        router_fp32: see `MoEConfig`.
    """

    num_experts: str = "num_experts|num_local_experts"
    top_k: str = "num_experts_per_tok"
    expert_width: str = "moe_intermediate_size"
    layers: MoELayers = every_layer
    scoring: str = "softmax"
    renormalize: Switch = "norm_topk_prob"
    min_weight_sum: str | None = None
    scaling_factor: str | None = None
    groups: Callable[[Fields], Groups] | None = None
    group_score: str = "top2"
    jitter: str | None = None
    activation: Callable[[Fields], Activation] = lambda _: SILU
    shared_width: SharedWidth | None = None
    shared_gate: bool = False
    shared_bias: Switch = False
    router_bias: bool = False
    expert_bias: bool = False
    selection_bias: bool = False
    weigh_input: bool = False
    router_fp32: bool = False


@dataclass(frozen=True, kw_only=True)
class Family:
    """One entry of the table.

    Attributes:
        architecture: the class name that config.json lists in `architectures`.
        moe: None for dense families.
        defaults: values of fields that config.json may leave out.
        only: fields that change what a model computes, and the only values that we do; a list must hold nothing else.
        reads: fields that most families must not set and that this one knows.
        attention: windows, chunks and layers without rotary, from the fields and the number of layers.
        latent: multi-head latent attention.
        qkv_bias / output_bias / dense_bias / head_bias: see `ModelConfig`.
        qk_norm: as in `ModelConfig`, switched by the flag `qk_norm_flag` where that is not None.
        qk_norm_after_rotary, sinks, norm, norm_after: see `ModelConfig`.
        splits_hidden: heads of queries are together as wide as the hidden state.
        dense_width: name of the field.
        rope_kinds: kinds of rotary scaling.
        partial_rotary: only a part of each head may rotate.
        rotary_interleaved: see `RotaryConfig`.
        own_amplitudes: `longrope` has an amplitude of its own for short and for long sequences.
        quantization: methods that stored weights may be quantised by.
        more: further fields of `ModelConfig`, from those of config.json.
    """

    architecture: str
    moe: MoEFamily | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    attention: AttentionLayers = full_attention
    latent: bool = False
    qkv_bias: Switch = False
    output_bias: Switch = False
    dense_bias: Switch = False
    head_bias: Switch = False
    qk_norm: str | None = None
    qk_norm_flag: str | None = None
    qk_norm_after_rotary: bool = False
    sinks: bool = False
    norm: str = "rms"
    norm_after: bool = False
    splits_hidden: bool = False
    dense_width: str = "intermediate_size"
    rope_kinds: tuple[str, ...] = ("default", "linear", "yarn", "llama3", "longrope")
    partial_rotary: bool = False
    rotary_interleaved: Switch = False
    own_amplitudes: bool = False
    quantization: tuple[str, ...] = ()
    more: Callable[[Fields], Mapping[str, Any]] | None = None


def switched(fields: Fields, switch: Switch) -> bool:
    """Return what a switch says for these fields; a flag that is absent and has no default is off."""
    return switch if isinstance(switch, bool) else fields.flag(switch, default=False)
