"""What a loader must hold for a transformers model: the state dict, put together anew by rules written out here.

Not the loader's own name map: this starts from module names in transformers' memory, not from files.
Letters: E experts, F expert width, D width; tensors are compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from moewe.models.weights import DenseFFN, LatentWeights, LayerWeights, ModelWeights, MoEWeights
from tests.support.fixtures import TRANSPOSED, reference_model

ROUTERS = ("gate", "router", "gate.wg")
SELECTION_BIASES = (
    "gate.e_score_correction_bias",
    "e_score_correction_bias",
    "gate.moe_statics.e_score_correction_bias",
)
SHARED = ("mlp.shared_experts.", "mlp.shared_expert.", "mlp.shared_mlp.", "feed_forward.shared_expert.")
NORMS = (("input_layernorm", "post_attention_layernorm"), ("post_attention_layernorm", "post_feedforward_layernorm"))
HEAD_NORMS = (("q_norm", "k_norm"), ("query_layernorm", "key_layernorm"))


def assert_same_as_reference(weights: ModelWeights, path: Path, experts: Sequence[int] | None = None) -> None:
    """Assert that `weights` hold, bit by bit, what transformers holds; `experts` are the local ones, in slot order."""
    reference = Reference(path)
    for i, layer in enumerate(weights.layers):
        reference.same_layer(layer, f"model.layers.{i}.", experts)
    reference.same(weights.embedding, "model.embed_tokens.weight")
    reference.same(weights.head, "lm_head.weight")
    reference.maybe(weights.head_bias, "lm_head.bias")
    reference.same(weights.final_norm, "model.norm.weight")
    reference.maybe(weights.final_norm_bias, "model.norm.bias")
    unused = sorted(reference.state.keys() - reference.used)
    assert not unused, f"transformers holds more than was loaded: {unused}"


class Reference:
    """The state dict of a transformers model, and which of its tensors were compared."""

    def __init__(self, path: Path) -> None:
        model = reference_model(path)
        self.state, self.heads = model.state_dict(), model.config.num_attention_heads
        self.interleaved = model.config.model_type == "gpt_oss"
        self.transposed = model.config.model_type in TRANSPOSED
        self.used: set[str] = set()

    def get(self, name: str) -> torch.Tensor:
        """Return a tensor and note that it was looked at."""
        self.used.add(name)
        return self.state[name]

    def choose(self, prefix: str, names: Sequence[str], suffix: str = ".weight") -> str:
        """Return which of `names` transformers has, with prefix and suffix."""
        (found,) = [f"{prefix}{name}{suffix}" for name in names if f"{prefix}{name}{suffix}" in self.state]
        return found

    def equal(self, held: object, expected: torch.Tensor) -> None:
        """Assert that `held` is `expected`, bit by bit."""
        assert isinstance(held, torch.Tensor) and held.shape == expected.shape
        assert torch.equal(held, expected.to(held.dtype))

    def same(self, held: object, *names: str) -> None:
        """Assert that `held` is the named tensors one below the other."""
        self.equal(held, torch.cat([self.get(name) for name in names]))

    def maybe(self, held: object, *names: str) -> None:
        """Assert that `held` is the named tensors, or None where transformers has none of them."""
        if held is not None or any(name in self.state for name in names):
            self.same(held, *names)

    def same_layer(self, layer: LayerWeights, prefix: str, experts: Sequence[int] | None) -> None:
        """Compare a whole layer."""
        after = f"{prefix}post_feedforward_layernorm.weight" in self.state
        attention = f"{prefix}self_attn."
        for kind in ("weight", "bias"):
            first, second = (f"{prefix}{name}.{kind}" for name in NORMS[after])
            compare = self.same if kind == "weight" else self.maybe
            compare(layer.input_norm if kind == "weight" else layer.input_norm_bias, first)
            compare(layer.post_attention_norm if kind == "weight" else layer.post_attention_norm_bias, second)
        if layer.latent is not None:
            assert layer.qkv is None
            self.same_latent(layer.latent, attention)
        else:
            self.same(layer.qkv, *(f"{attention}{p}_proj.weight" for p in "qkv"))
            self.maybe(layer.qkv_bias, *(f"{attention}{p}_proj.bias" for p in "qkv"))
        self.same(layer.o, f"{attention}o_proj.weight")
        self.maybe(layer.o_bias, f"{attention}o_proj.bias")
        if layer.q_norm is not None:
            for held, names in zip((layer.q_norm, layer.k_norm), zip(*HEAD_NORMS)):
                self.same(held, self.choose(attention, names))
        self.maybe(layer.sinks, f"{attention}sinks")
        block = next(b for b in ("mlp.", "feed_forward.", "block_sparse_moe.") if self.has(prefix + b))
        if layer.dense is not None:
            assert layer.moe is None
            self.same_ffn(layer.dense, prefix + block)
        else:
            assert layer.moe is not None
            self.same_moe(layer.moe, prefix, prefix + block, experts)

    def has(self, prefix: str) -> bool:
        """True when names begin with `prefix`."""
        return any(name.startswith(prefix) for name in self.state)

    def same_latent(self, held: LatentWeights, prefix: str) -> None:
        """Compare latent attention; the rows of kv_b are, for each head, those of its keys, then of its values."""
        if held.q is not None:
            self.same(held.q, f"{prefix}q_proj.weight")
        else:
            self.same(held.q_a, f"{prefix}q_a_proj.weight")
            self.same(held.q_a_norm, f"{prefix}q_a_layernorm.weight")
            self.same(held.q_b, f"{prefix}q_b_proj.weight")
        self.maybe(held.q_a_bias, f"{prefix}q_a_proj.bias")
        self.same(held.kv_a, f"{prefix}kv_a_proj_with_mqa.weight")
        self.maybe(held.kv_a_bias, f"{prefix}kv_a_proj_with_mqa.bias")
        self.same(held.kv_a_norm, f"{prefix}kv_a_layernorm.weight")
        kv_b = self.get(f"{prefix}kv_b_proj.weight")
        kv_b = kv_b.view(self.heads, -1, kv_b.shape[-1])
        assert isinstance(held.kv_b_k, torch.Tensor) and isinstance(held.kv_b_v, torch.Tensor)
        self.equal(torch.cat([held.kv_b_k, held.kv_b_v], dim=1), kv_b)

    def same_ffn(self, held: DenseFFN, prefix: str) -> None:
        """Compare a gated FFN in three modules."""
        self.same(held.w13, f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight")
        self.same(held.w2, f"{prefix}down_proj.weight")
        self.maybe(held.b13, f"{prefix}gate_proj.bias", f"{prefix}up_proj.bias")
        self.maybe(held.b2, f"{prefix}down_proj.bias")

    def same_moe(self, held: MoEWeights, layer: str, block: str, experts: Sequence[int] | None) -> None:
        """Compare router, experts and shared experts."""
        local = slice(None) if experts is None else list(experts)
        router = self.choose(block, ROUTERS)
        self.same(held.router, router)
        self.maybe(held.router_bias, router.removesuffix("weight") + "bias")
        if held.selection_bias is not None:
            self.equal(held.selection_bias, self.get(self.choose(block, SELECTION_BIASES, "")).view(-1))
        gate_up, down = self.get(f"{block}experts.gate_up_proj"), self.get(f"{block}experts.down_proj")
        if self.transposed:
            gate_up, down = gate_up.mT, down.mT
        self.equal(held.experts.w13, self.gate_first(gate_up)[local])
        self.equal(held.experts.w2, down[local])
        if held.experts.b13 is not None:
            self.equal(held.experts.b13, self.gate_first(self.get(f"{block}experts.gate_up_proj_bias"))[local])
            self.equal(held.experts.b2, self.get(f"{block}experts.down_proj_bias")[local])
        if held.shared is not None and f"{layer}shared_mlp.input_linear.weight" in self.state:
            self.same(held.shared.w13, f"{layer}shared_mlp.input_linear.weight")
            self.same(held.shared.w2, f"{layer}shared_mlp.output_linear.weight")
        elif held.shared is not None:
            self.same_ffn(held.shared, layer + next(name for name in SHARED if self.has(layer + name)))
        self.maybe(held.shared_gate, f"{block}shared_expert_gate.weight")

    def gate_first(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return gate and up of [E, 2F, ...] one behind the other where transformers alternates them."""
        return torch.cat([gate_up[:, 0::2], gate_up[:, 1::2]], dim=1) if self.interleaved else gate_up
