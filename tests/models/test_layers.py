"""Every switch of the decoder, alone and with any others, against a slow decoder in fp64, in chunks of any size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moewe.models.config import LayerAttention, ModelConfig, QueryTemperature
from moewe.telemetry import COMPONENTS
from tests.support.numerics import LOGITS_AGAINST_REFERENCE, assert_within
from tests.support.one_sequence import run_one
from tests.support.random_models import VOCAB, model_configs, plain_config, random_weights
from tests.support.slow_decoder import slow_logits

NOPE = (LayerAttention(rotary=False), LayerAttention())
SWITCHES: dict[str, dict[str, Any]] = {
    "attention_bias": {"attention_bias": True},
    "output_bias": {"output_bias": True},
    "dense_bias": {"dense_bias": True},
    "qk_norm_head": {"qk_norm": "head"},
    "qk_norm_full": {"qk_norm": "full"},
    "qk_norm_unit": {"qk_norm": "unit"},
    "qk_norm_head_after": {"qk_norm": "head", "qk_norm_after_rotary": True},
    "qk_norm_full_after": {"qk_norm": "full", "qk_norm_after_rotary": True},
    "no_rotary": {"layer_attention": NOPE},
    "no_rotary_unit": {"layer_attention": NOPE, "qk_norm": "unit"},
    "temperature": {"layer_attention": NOPE, "query_temperature": QueryTemperature(scale=0.7, floor_scale=3.0)},
    "window": {"layer_attention": (LayerAttention(window=5), LayerAttention())},
    "chunk": {"layer_attention": (LayerAttention(chunk=6), LayerAttention(rotary=False))},
    "sinks": {"sinks": True},
    "score_cap": {"score_cap": 0.5},
    "logits_cap": {"logits_cap": 0.5},
    "layer_norm": {"norm": "layer"},
    "norm_after": {"norm_after": True},
    "embedding_multiplier": {"embedding_multiplier": 3.0},
    "residual_multiplier": {"residual_multiplier": 0.3},
    "logits_multiplier": {"logits_multiplier": 0.2},
    "head_bias": {"head_bias": True},
    "attention_scale": {"attention_scale": 0.7},
}


def tokens_of(num_tokens: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def compare(config: ModelConfig, *, chunk: int, long: bool = False, seed: int = 0, num_tokens: int = 17) -> None:
    weights, tokens = random_weights(config, seed), tokens_of(num_tokens, seed)
    expected = slow_logits(config, weights, tokens, long=long)
    actual = run_one(config, weights, tokens, chunk=chunk, long=long).logits
    assert_within(actual.double(), expected, LOGITS_AGAINST_REFERENCE)


@pytest.mark.parametrize("chunk", [1, 5, 17])
def test_a_plain_decoder(chunk: int) -> None:
    compare(plain_config(), chunk=chunk)


@pytest.mark.parametrize("name", SWITCHES)
def test_one_switch(name: str) -> None:
    compare(plain_config(**SWITCHES[name]), chunk=5)


@pytest.mark.parametrize(
    "name",
    ["no_rotary", "temperature", "qk_norm_head_after", "qk_norm_full_after", "qk_norm_unit", "window", "chunk"]
    + ["score_cap", "logits_cap", "norm_after", "attention_scale"]
    + [f"{part}_multiplier" for part in ("embedding", "residual", "logits")],
)
def test_a_switch_without_weights_of_its_own_makes_a_difference(name: str) -> None:
    """Else equality with the reference would say nothing of it."""
    values = SWITCHES[name]
    config, weights = plain_config(**values), random_weights(plain_config(**values))
    kept = {"temperature": ["layer_attention"], "qk_norm_head_after": ["qk_norm"], "qk_norm_full_after": ["qk_norm"]}
    off = plain_config(**{key: values[key] for key in kept.get(name, [])})
    with_it, without = (run_one(c, weights, tokens_of(17), chunk=5).logits for c in (config, off))
    assert (with_it - without).abs().max() > 100 * LOGITS_AGAINST_REFERENCE


@settings(max_examples=40, deadline=None)
@given(config=model_configs(), chunk=st.sampled_from([1, 4, 7, 17]), long=st.booleans(), seed=st.integers(0, 1 << 20))
def test_any_switches_together(config: ModelConfig, chunk: int, long: bool, seed: int) -> None:
    compare(config, chunk=chunk, long=long, seed=seed)


@settings(max_examples=15, deadline=None)
@given(config=model_configs(), latent=model_configs(latent=True))
def test_weight_bytes_are_those_of_the_tensors_held(config: ModelConfig, latent: ModelConfig) -> None:
    """A step of one row reads every tensor once, K experts of each layer, and one row of the embedding."""
    for drawn in (config, latent):
        weights = random_weights(drawn)
        counters = run_one(drawn, weights, [3], chunk=1).counters
        moved = dict(zip(COMPONENTS, counters.bytes_moved.sum(0).tolist()))
        held, routed = weights.num_bytes, 0
        for layer in weights.layers:
            if layer.moe is not None and drawn.moe is not None:
                per_slot = layer.moe.experts.bytes_per_slot
                held -= drawn.moe.routing.num_experts * per_slot
                routed += drawn.moe.routing.top_k * per_slot
        if not drawn.head_tied:
            held -= weights.embedding.nbytes
        assert moved["routed"] == routed
        assert moved["attention"] + moved["dense"] + moved["shared"] == held + weights.embedding[0].nbytes
        elements = 2 * drawn.num_kv_heads * drawn.head_dim if drawn.latent is None else 14
        assert moved["kv"] == 2 * 4 * drawn.num_layers * elements  # one token written, one read
        assert counters.expert_tokens.sum() == len(drawn.moe_layers) * (drawn.moe.routing.top_k if drawn.moe else 0)


def test_a_norm_whose_weights_are_of_another_kind_is_refused() -> None:
    config = plain_config()
    with pytest.raises(AssertionError, match="its bias says otherwise"):
        run_one(replace(config, norm="layer"), random_weights(config), [1], chunk=1)
