"""`ModelConfig`: one decoder's shape and switches in our words, whatever the family called them.

Not a parser: `models.families` turns a Hugging Face config.json into this record, one table entry a family.
Letters: D hidden_size, H query heads, F expert width, E experts, K top-k, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..moe.routing import RoutingConfig


class ConfigError(ValueError):
    """A mistake in a model folder or a flag; the message is one line with field, value and fix."""


@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """Rotary position embedding.

    Attributes:
        theta: base of the frequencies.
        rotary_dim: leading elements of a head that rotate (head_dim when all do).
    """

    theta: float
    rotary_dim: int


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Routed (and shared) experts of the MoE layers.

    Attributes:
        routing: how logits become experts and weights.
        expert_width: F of a routed expert.
        shared_width: width of the shared expert as one FFN; 0 when there is none.
        shared_gate: the shared expert is scaled by sigmoid(gate(x)).
        selection_bias: the router holds a bias per expert that chooses but never weighs.
    """

    routing: RoutingConfig
    expert_width: int
    shared_width: int = 0
    shared_gate: bool = False
    selection_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder-only transformer.

    Attributes:
        family: key in `models.families.FAMILIES`.
        moe_layers: layer numbers with routed experts, ascending; all others have a dense FFN of `dense_width`.
        moe: None for a dense model.
        attention_bias / output_bias: biases on q, k, v / on o.
        qk_norm: None, `head` (RMSNorm over each head) or `full` (over all heads together, before splitting).
        norm_eps: of every RMSNorm.
        head_tied: the output head is the embedding matrix.
        max_position_embeddings: longest sequence.
        dtype: name of the number format that the checkpoint declares.
        eos_token_ids: from generation_config.json if there, else config.json; may be empty.
    """

    family: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dense_width: int
    rotary: RotaryConfig
    norm_eps: float
    max_position_embeddings: int
    dtype: str
    moe_layers: tuple[int, ...] = ()
    moe: MoEConfig | None = None
    attention_bias: bool = False
    output_bias: bool = False
    qk_norm: str | None = None
    head_tied: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def is_moe(self, layer: int) -> bool:
        """True when decoder layer number `layer` has routed experts."""
        return layer in self.moe_layers
