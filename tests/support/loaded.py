"""What a loader must hold for a transformers model: the state dict, put together anew by rules written out here.

Not the loader's own name map: this starts from module names in transformers' memory, not from files.
Letters: E experts; tensors are compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from moewe.models.weights import DenseFFN, ModelWeights
from tests.support.fixtures import reference_model


def assert_same_as_reference(weights: ModelWeights, path: Path, experts: Sequence[int] | None = None) -> None:
    """Assert that `weights` hold, bit by bit, what transformers holds; `experts` are the local ones, in slot order."""
    state = reference_model(path).state_dict()
    used: set[str] = set()

    def get(name: str) -> torch.Tensor:
        used.add(name)
        return state[name]

    def stack(prefix: str, names: Sequence[str]) -> torch.Tensor:
        return torch.cat([get(f"{prefix}{name}") for name in names])

    def same(held: torch.Tensor | None, expected: torch.Tensor) -> None:
        assert held is not None and held.shape == expected.shape
        assert torch.equal(held, expected)

    def same_ffn(held: DenseFFN, prefix: str) -> None:
        same(held.w13, stack(prefix, ["gate_proj.weight", "up_proj.weight"]))
        same(held.w2, get(prefix + "down_proj.weight"))

    same(weights.embedding, get("model.embed_tokens.weight"))
    same(weights.head, get("lm_head.weight"))
    same(weights.final_norm, get("model.norm.weight"))
    for i, layer in enumerate(weights.layers):
        prefix = f"model.layers.{i}."
        attention = prefix + "self_attn."
        same(layer.input_norm, get(prefix + "input_layernorm.weight"))
        same(layer.post_attention_norm, get(prefix + "post_attention_layernorm.weight"))
        same(layer.qkv, stack(attention, ["q_proj.weight", "k_proj.weight", "v_proj.weight"]))
        same(layer.o, get(attention + "o_proj.weight"))
        if layer.qkv_bias is not None:
            same(layer.qkv_bias, stack(attention, ["q_proj.bias", "k_proj.bias", "v_proj.bias"]))
        if layer.o_bias is not None:
            same(layer.o_bias, get(attention + "o_proj.bias"))
        if layer.q_norm is not None:
            same(layer.q_norm, get(attention + "q_norm.weight"))
            same(layer.k_norm, get(attention + "k_norm.weight"))
        mlp = prefix + "mlp."
        if layer.dense is not None:
            assert layer.moe is None
            same_ffn(layer.dense, mlp)
            continue
        assert layer.moe is not None
        local = slice(None) if experts is None else list(experts)
        same(layer.moe.router, get(mlp + "gate.weight"))
        same(layer.moe.experts.w13, get(mlp + "experts.gate_up_proj")[local])
        same(layer.moe.experts.w2, get(mlp + "experts.down_proj")[local])
        if layer.moe.selection_bias is not None:
            same(layer.moe.selection_bias, get(mlp + "gate.e_score_correction_bias"))
        if layer.moe.shared is not None:
            name = "shared_experts." if mlp + "shared_experts.up_proj.weight" in state else "shared_expert."
            same_ffn(layer.moe.shared, mlp + name)
        if layer.moe.shared_gate is not None:
            same(layer.moe.shared_gate, get(mlp + "shared_expert_gate.weight"))
    assert used == state.keys(), f"transformers holds more than was loaded: {sorted(state.keys() - used)}"
