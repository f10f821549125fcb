"""`ModelConfig`: one decoder's shape and switches in our words, whatever the family called them.

Not a parser: `models.families` turns a Hugging Face config.json into this record, one table entry a family.
Letters: D hidden_size, H query heads, F expert width, E experts, K top-k, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..moe.activation import SILU, Activation
from ..moe.routing import RoutingConfig
from ..quant import Quantization


class ConfigError(ValueError):
    """A mistake in a model folder or a flag; the message is one line with field, value and fix."""


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """How the frequencies of a rotary embedding were stretched for longer texts.

    Attributes:
        kind: `linear`, `yarn` (Peng et al., 2023), `llama3` or `longrope` (Ding et al., 2024).
        factor: how many times longer.
        original_max_position: longest sequence before stretching; 0 where the kind does not need it.
        amplitude: factor on cos and sin (`longrope`: of the short factors).
        beta_fast, beta_slow, truncate: of `yarn`: between how many turns the ramp lies, and whether its ends are
            rounded to whole dims.
        low_freq_factor, high_freq_factor: of `llama3`.
        short_factors, long_factors, long_amplitude: of `longrope`: one factor a frequency, [rotary_dim / 2]; the long
            ones serve sequences that may grow beyond `original_max_position`.
    """

    kind: str
    factor: float = 1.0
    original_max_position: int = 0
    amplitude: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    long_amplitude: float = 1.0


@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """Rotary position embedding.

    Attributes:
        theta: base of the frequencies.
        rotary_dim: leading elements of a head that rotate (head_dim when all do; the rope part of a latent head).
        interleaved: neighbours (0, 1), (2, 3), ... turn together instead of (0, n/2), (1, n/2 + 1), ...
        scaling: None for frequencies as theta gives them.
    """

    theta: float
    rotary_dim: int
    interleaved: bool = False
    scaling: RotaryScaling | None = None


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-AI, 2024): K and V of all heads are made from one latent row a token.

    A head of Q and K is `nope_dim` elements without and `rope_dim` with rotary embedding; the rope part of K is shared
    by all heads. Cached are `kv_rank + rope_dim` elements a token.

    Attributes:
        kv_rank: width of the latent.
        rope_dim, nope_dim, value_dim: elements of a head.
        query_rank: width of the latent that queries are made from; 0 when they come from the hidden state directly.
        norm_eps: of the norms over both latents, whatever the eps of the other norms.
    """

    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int = 0
    norm_eps: float = 1e-6


@dataclass(frozen=True, kw_only=True)
class LayerAttention:
    """What differs between the attention of one layer and of another.

    Attributes:
        window: a row sees this many tokens, its own included; 0 sees all before it.
        chunk: a row sees only tokens of its own run of `chunk` absolute positions; 0 knows no runs.
        rotary: positions are rotated into Q and K.
    """

    window: int = 0
    chunk: int = 0
    rotary: bool = True


@dataclass(frozen=True, kw_only=True)
class QueryTemperature:
    """Queries of layers without rotary grow by 1 + scale * ln(1 + floor((position + 1) / floor_scale))."""

    scale: float
    floor_scale: float


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Routed (and shared) experts of the MoE layers.

    Attributes:
        routing: how logits become experts and weights.
        expert_width: F of a routed expert.
        activation: between the two products of a routed expert.
        shared_width: width of the shared expert as one FFN; 0 when there is none.
        shared_gate: the shared expert is scaled by sigmoid(gate(x)).
        shared_bias: the shared expert has biases.
        selection_bias: the router holds a bias per expert that chooses but never weighs.
        router_bias: the router holds a bias that is part of its logits.
        expert_bias: routed experts have biases on both products.
        weigh_input: a token's weight multiplies what goes into its only expert, not what comes out (top_k = 1).
        router_fp32: the router is kept in fp32 whatever the dtype of the model.
    """

    routing: RoutingConfig
    expert_width: int
    activation: Activation = SILU
    shared_width: int = 0
    shared_gate: bool = False
    shared_bias: bool = False
    selection_bias: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    weigh_input: bool = False
    router_fp32: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder-only transformer.

    Attributes:
        family: key in `models.families.FAMILIES`.
        head_dim: elements of a head of Q and K (with `latent`: nope_dim + rope_dim).
        attention_scale: factor on the scores.
        layer_attention: what is special about each layer's attention; empty means that no layer is special.
        latent: None where K and V are cached as heads.
        moe_layers: layer numbers with routed experts, ascending; all others have a dense FFN of `dense_width`.
        moe: None for a dense model.
        attention_bias / output_bias: biases on q, k, v (with `latent`: on the two down-projections) / on o.
        dense_bias: biases in dense FFNs.
        qk_norm: None, `head` (RMSNorm over each head), `full` (over all heads together, before splitting) or `unit`
            (over each head without weights, only on layers with rotary).
        qk_norm_after_rotary: where `qk_norm` stands.
        sinks: a learned score a query head takes part in every softmax and yields no value.
        score_cap / logits_cap: scores / logits become cap * tanh(x / cap); 0 leaves them.
        query_temperature: None leaves queries as they are.
        norm: `rms` or `layer` (LayerNorm with weight and bias), for the norms around blocks and the final one.
        norm_after: norms stand behind attention and FFN, on what they add, instead of in front of them.
        norm_eps: of every norm but those of a latent.
        embedding_multiplier / residual_multiplier / logits_multiplier: factors on embedded tokens, on what each block
            adds, and on the logits.
        head_tied: the output head is the embedding matrix.
        head_bias: the output head has a bias.
        max_position_embeddings: longest sequence.
        dtype: name of the number format that the checkpoint declares.
        quantization: None for a checkpoint whose matrices are all stored as `dtype`.
        eos_token_ids: from generation_config.json if there, else config.json; may be empty.
    """

    family: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_scale: float
    dense_width: int
    rotary: RotaryConfig
    norm_eps: float
    max_position_embeddings: int
    dtype: str
    quantization: Quantization | None = None
    layer_attention: tuple[LayerAttention, ...] = ()
    latent: LatentConfig | None = None
    moe_layers: tuple[int, ...] = ()
    moe: MoEConfig | None = None
    attention_bias: bool = False
    output_bias: bool = False
    dense_bias: bool = False
    qk_norm: str | None = None
    qk_norm_after_rotary: bool = False
    sinks: bool = False
    score_cap: float = 0.0
    logits_cap: float = 0.0
    query_temperature: QueryTemperature | None = None
    norm: str = "rms"
    norm_after: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    head_tied: bool = False
    head_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def is_moe(self, layer: int) -> bool:
        """True when decoder layer number `layer` has routed experts."""
        return layer in self.moe_layers

    def attention_of(self, layer: int) -> LayerAttention:
        """Return what is special about the attention of decoder layer number `layer`."""
        return self.layer_attention[layer] if self.layer_attention else LayerAttention()
