"""Models that no family has: drawn configs with any set of switches, and random weights in the shapes they ask for.

Not checkpoints (tests/support/fixtures.py). Sizes are tiny: D 16, V 19, at most 3 layers.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from moewe.models.config import (
    LatentConfig,
    LayerAttention,
    ModelConfig,
    MoEConfig,
    QueryTemperature,
    RotaryConfig,
    RotaryScaling,
)
from moewe.models.weights import DenseFFN, LatentWeights, LayerWeights, ModelWeights, MoEWeights
from moewe.moe.activation import SILU, Activation
from moewe.moe.gated import ExpertWeights
from moewe.moe.routing import RoutingConfig

WIDTH, VOCAB, FFN_WIDTH, HEADS, HEAD_DIM = 16, 19, 12, 4, 8
SCALINGS = (
    None,
    RotaryScaling(kind="linear", factor=2.0),
    RotaryScaling(kind="yarn", factor=4.0, original_max_position=8, amplitude=1.2, truncate=False),
    RotaryScaling(kind="llama3", factor=8.0, original_max_position=8, high_freq_factor=3.0),
)
LAYERS = (
    LayerAttention(),
    LayerAttention(window=5),
    LayerAttention(chunk=6),
    LayerAttention(rotary=False),
    LayerAttention(window=3, rotary=False),
)


def longrope(rotary_dim: int) -> RotaryScaling:
    factors = tuple(1.0 + i for i in range(rotary_dim // 2))
    return RotaryScaling(
        kind="longrope", original_max_position=8, short_factors=factors, long_factors=tuple(3 * f for f in factors),
        amplitude=1.1, long_amplitude=1.4,
    )  # fmt: skip


def plain_config(**changes: Any) -> ModelConfig:
    """A dense model of two layers without any switch, but for `changes`."""
    rotary = RotaryConfig(theta=100.0, rotary_dim=HEAD_DIM)
    values: dict[str, Any] = dict(
        family="drawn", num_layers=2, hidden_size=WIDTH, vocab_size=VOCAB, num_heads=HEADS, num_kv_heads=2,
        head_dim=HEAD_DIM, attention_scale=HEAD_DIM**-0.5, dense_width=FFN_WIDTH, rotary=rotary, norm_eps=1e-5,
        max_position_embeddings=64, dtype="float32",
    )  # fmt: skip
    return ModelConfig(**{**values, **changes})


@st.composite
def moe_configs(draw: st.DrawFn) -> MoEConfig:
    weigh_input = draw(st.booleans())
    scoring = draw(st.sampled_from(["softmax", "sigmoid", "sparsemixer"]))
    num_groups = 1 if scoring == "sparsemixer" else draw(st.sampled_from([1, 3]))
    routing = RoutingConfig(
        num_experts=6,
        top_k=1 if weigh_input else 2,
        scoring=scoring,
        renormalize=draw(st.booleans()),
        scaling_factor=draw(st.sampled_from([1.0, 2.5])),
        num_groups=num_groups,
        top_groups=min(2, num_groups),
    )
    return MoEConfig(
        routing=routing,
        expert_width=8,
        activation=draw(st.sampled_from([SILU, Activation(kind="clamped", limit=0.5)])),
        shared_width=draw(st.sampled_from([0, 8])),
        shared_gate=draw(st.booleans()),
        shared_bias=draw(st.booleans()),
        selection_bias=scoring != "sparsemixer" and draw(st.booleans()),
        router_bias=draw(st.booleans()),
        expert_bias=draw(st.booleans()),
        weigh_input=weigh_input,
    )


@st.composite
def rotary_configs(draw: st.DrawFn, rotary_dims: tuple[int, ...]) -> RotaryConfig:
    rotary_dim = draw(st.sampled_from(rotary_dims))
    scaling = draw(st.sampled_from([*SCALINGS, longrope(rotary_dim)]))
    return RotaryConfig(theta=100.0, rotary_dim=rotary_dim, interleaved=draw(st.booleans()), scaling=scaling)


@st.composite
def model_configs(draw: st.DrawFn, *, latent: bool = False) -> ModelConfig:
    """Any set of switches that go together."""
    flag, num_layers = st.booleans(), draw(st.integers(1, 3))
    moe = draw(st.none() | moe_configs())
    changes: dict[str, Any] = {}
    if latent:
        shape = LatentConfig(kv_rank=10, rope_dim=4, nope_dim=6, value_dim=5, query_rank=draw(st.sampled_from([0, 7])))
        changes = dict(latent=shape, head_dim=10, num_kv_heads=HEADS, rotary=draw(rotary_configs((4,))))
    else:
        rules = st.lists(st.sampled_from(LAYERS), min_size=num_layers, max_size=num_layers).map(tuple)
        changes = dict(
            num_kv_heads=draw(st.sampled_from([1, 2, 4])),
            rotary=draw(rotary_configs((8, 4))),
            layer_attention=draw(st.just(()) | rules),
            qk_norm=draw(st.sampled_from([None, "head", "full", "unit"])),
            qk_norm_after_rotary=draw(flag),
            query_temperature=draw(st.sampled_from([None, QueryTemperature(scale=0.5, floor_scale=3.0)])),
        )
    return plain_config(
        **changes,
        num_layers=num_layers,
        attention_scale=draw(st.sampled_from([0.3, 0.5])),
        moe=moe,
        moe_layers=tuple(sorted(draw(st.sets(st.integers(0, num_layers - 1), min_size=1)))) if moe else (),
        attention_bias=draw(flag),
        output_bias=draw(flag),
        dense_bias=draw(flag),
        sinks=draw(flag),
        score_cap=draw(st.sampled_from([0.0, 1.5])),
        logits_cap=draw(st.sampled_from([0.0, 2.0])),
        norm=draw(st.sampled_from(["rms", "layer"])),
        norm_after=draw(flag),
        embedding_multiplier=draw(st.sampled_from([1.0, 2.0])),
        residual_multiplier=draw(st.sampled_from([1.0, 0.6])),
        logits_multiplier=draw(st.sampled_from([1.0, 0.25])),
        head_tied=draw(flag),
        head_bias=draw(flag),
    )


def random_weights(config: ModelConfig, seed: int = 0) -> ModelWeights:
    """Return fp32 weights for `config`; products keep the size of what they multiply."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    def vector(*shape: int, wanted: bool = True, at: float = 0.0) -> torch.Tensor | None:
        return at + 0.3 * torch.randn(*shape, generator=generator) if wanted else None

    def scale(*shape: int) -> torch.Tensor:
        return 1 + 0.3 * torch.randn(*shape, generator=generator)

    def ffn(width: int, biased: bool) -> DenseFFN:
        return DenseFFN(
            w13=matrix(2 * width, WIDTH), w2=matrix(WIDTH, width),
            b13=vector(2 * width, wanted=biased), b2=vector(WIDTH, wanted=biased),
        )  # fmt: skip

    def experts(moe: MoEConfig) -> MoEWeights:
        count, width = moe.routing.num_experts, moe.expert_width
        return MoEWeights(
            router=matrix(count, WIDTH),
            experts=ExpertWeights(
                w13=matrix(count, 2 * width, WIDTH), w2=matrix(count, WIDTH, width),
                b13=vector(count, 2 * width, wanted=moe.expert_bias), b2=vector(count, WIDTH, wanted=moe.expert_bias),
            ),
            router_bias=vector(count, wanted=moe.router_bias),
            selection_bias=vector(count, wanted=moe.selection_bias),
            shared=ffn(moe.shared_width, moe.shared_bias) if moe.shared_width else None,
            shared_gate=matrix(1, WIDTH) if moe.shared_width and moe.shared_gate else None,
        )  # fmt: skip

    def latent(shape: LatentConfig) -> LatentWeights:
        queries, rank = HEADS * (shape.nope_dim + shape.rope_dim), shape.query_rank
        made = LatentWeights(
            kv_a=matrix(shape.kv_rank + shape.rope_dim, WIDTH), kv_a_norm=scale(shape.kv_rank),
            kv_b_k=matrix(HEADS, shape.nope_dim, shape.kv_rank), kv_b_v=matrix(HEADS, shape.value_dim, shape.kv_rank),
            kv_a_bias=vector(shape.kv_rank + shape.rope_dim, wanted=config.attention_bias),
        )  # fmt: skip
        if not rank:
            made.q = matrix(queries, WIDTH)
        else:
            made.q_a, made.q_a_norm, made.q_b = matrix(rank, WIDTH), scale(rank), matrix(queries, rank)
            made.q_a_bias = vector(rank, wanted=config.attention_bias)
        return made

    def layer(number: int) -> LayerWeights:
        dim, kv_heads, shape = config.head_dim, config.num_kv_heads, config.latent
        widths = {"head": (dim, dim), "full": (HEADS * dim, kv_heads * dim)}.get(str(config.qk_norm))
        total, out = (HEADS + 2 * kv_heads) * dim, HEADS * (shape.value_dim if shape else dim)
        return LayerWeights(
            input_norm=scale(WIDTH),
            input_norm_bias=vector(WIDTH, wanted=config.norm == "layer"),
            post_attention_norm=scale(WIDTH),
            post_attention_norm_bias=vector(WIDTH, wanted=config.norm == "layer"),
            qkv=None if shape else matrix(total, WIDTH),
            qkv_bias=vector(total, wanted=config.attention_bias and not shape),
            latent=latent(shape) if shape else None,
            o=matrix(WIDTH, out),
            o_bias=vector(WIDTH, wanted=config.output_bias),
            q_norm=scale(widths[0]) if widths else None,
            k_norm=scale(widths[1]) if widths else None,
            sinks=vector(HEADS, wanted=config.sinks),
            dense=None if config.is_moe(number) else ffn(config.dense_width, config.dense_bias),
            moe=experts(config.moe) if config.moe and config.is_moe(number) else None,
        )

    embedding = scale(VOCAB, WIDTH) - 1
    return ModelWeights(
        embedding=embedding,
        head=embedding if config.head_tied else matrix(VOCAB, WIDTH),
        head_bias=vector(VOCAB, wanted=config.head_bias),
        final_norm=scale(WIDTH),
        final_norm_bias=vector(WIDTH, wanted=config.norm == "layer"),
        layers=[layer(number) for number in range(config.num_layers)],
    )
