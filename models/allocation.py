"""The tensors of one rank before anything is in them, and for every parameter the views that it fills.

Not reading: `loading` and `dummy` write through the views. Fused tensors (qkv, w13) exist once and are filled in parts.
Letters: D width, H query heads, Hkv KV heads, Dh head width, F FFN width, E experts, S local expert slots.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch

from ..moe.experts import ExpertWeights
from ..moe.wide_ep.placement import ExpertPlacement
from .config import ModelConfig, MoEConfig
from .name_map import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    Shapes,
    attention_shapes,
    dense_shapes,
    expert_shapes,
    keeps_fp32,
    layer_prefix,
    router_shapes,
    shared_shapes,
    tensor_names,
)
from .weights import DenseFFN, LayerWeights, ModelWeights, MoEWeights


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Empty weights and the way into them.

    Attributes:
        weights: uninitialised.
        targets: parameter name -> contiguous views that hold it on this rank (several when an expert has two slots).
    """

    weights: ModelWeights
    targets: dict[str, list[torch.Tensor]]


def allocate_weights(
    config: ModelConfig, placement: ExpertPlacement | None, rank: int, *, dtype: torch.dtype, device: torch.device
) -> Allocation:
    """Allocate what `rank` holds under `placement` (None, or one without experts, for a dense model)."""
    return _Allocator(config, placement, rank, dtype, device).run()


@dataclass
class _Allocator:
    config: ModelConfig
    placement: ExpertPlacement | None
    rank: int
    dtype: torch.dtype
    device: torch.device
    targets: dict[str, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))

    def run(self) -> Allocation:
        config, dim = self.config, self.config.hidden_size
        embedding = self._single(EMBEDDING, (config.vocab_size, dim))
        layers = [self._layer(layer) for layer in range(config.num_layers)]
        weights = ModelWeights(
            embedding=embedding,
            head=embedding if config.head_tied else self._single(HEAD, (config.vocab_size, dim)),
            final_norm=self._single(FINAL_NORM, (dim,)),
            layers=layers,
        )
        return Allocation(weights=weights, targets=dict(self.targets))

    def _layer(self, layer: int) -> LayerWeights:
        config, prefix, dim = self.config, layer_prefix(layer), self.config.hidden_size
        shapes = {prefix + name: shape for name, shape in attention_shapes(config).items()}
        attention = prefix + "self_attn."
        is_moe = config.moe is not None and config.is_moe(layer)
        return LayerWeights(
            input_norm=self._single(prefix + "input_layernorm.weight", (dim,)),
            qkv=self._fused([f"{attention}{p}_proj.weight" for p in "qkv"], shapes),
            qkv_bias=self._fused([f"{attention}{p}_proj.bias" for p in "qkv"], shapes)
            if config.attention_bias
            else None,
            o=self._single(attention + "o_proj.weight", shapes[attention + "o_proj.weight"]),
            o_bias=self._single(attention + "o_proj.bias", (dim,)) if config.output_bias else None,
            q_norm=self._optional(attention + "q_norm.weight", shapes),
            k_norm=self._optional(attention + "k_norm.weight", shapes),
            post_attention_norm=self._single(prefix + "post_attention_layernorm.weight", (dim,)),
            dense=None if is_moe else self._ffn(prefix, dense_shapes(config)),
            moe=self._moe(config.moe, layer) if is_moe and config.moe is not None else None,
        )

    def _moe(self, moe: MoEConfig, layer: int) -> MoEWeights:
        config, prefix, names = self.config, layer_prefix(layer), tensor_names(self.config)
        router = {prefix + name: shape for name, shape in router_shapes(config, moe).items()}
        shared = shared_shapes(config, moe)
        gate = f"{names.block}.{names.shared}_gate.weight"
        return MoEWeights(
            router=self._single(f"{prefix}{names.block}.gate.weight", router[f"{prefix}{names.block}.gate.weight"]),
            selection_bias=self._optional(f"{prefix}{names.block}.gate.e_score_correction_bias", router),
            experts=self._experts(moe, layer),
            shared=self._ffn(prefix, {n: s for n, s in shared.items() if n != gate}) if shared else None,
            shared_gate=self._single(prefix + gate, shared[gate]) if moe.shared_gate else None,
        )

    def _experts(self, moe: MoEConfig, layer: int) -> ExpertWeights:
        if self.placement is None:
            experts = list(range(moe.routing.num_experts))
        else:
            experts = self.placement.local_experts(self.rank, self.config.moe_layers.index(layer)).tolist()
        width, dim, count = moe.expert_width, self.config.hidden_size, len(experts)
        w13 = self._empty((count, 2 * width, dim), self.dtype)  # [S, 2F, D]
        w2 = self._empty((count, dim, width), self.dtype)  # [S, D, F]
        for slot, expert in enumerate(experts):
            views = (w13[slot, :width], w13[slot, width:], w2[slot])
            for name, view in zip(expert_shapes(self.config, moe, expert), views):
                self.targets[layer_prefix(layer) + name].append(view)
        return ExpertWeights(w13=w13, w2=w2)

    def _ffn(self, prefix: str, shapes: Shapes) -> DenseFFN:
        shapes = {prefix + name: shape for name, shape in shapes.items()}
        gate, up, down = shapes
        return DenseFFN(w13=self._fused([gate, up], shapes), w2=self._single(down, shapes[down]))

    def _fused(self, names: list[str], shapes: Shapes) -> torch.Tensor:
        """Allocate parameters one below the other in one tensor."""
        rows = [shapes[name][0] for name in names]
        tensor = self._empty((sum(rows), *shapes[names[0]][1:]), self.dtype)
        for name, view in zip(names, torch.split(tensor, rows)):
            self.targets[name].append(view)
        return tensor

    def _optional(self, name: str, shapes: Shapes) -> torch.Tensor | None:
        return self._single(name, shapes[name]) if name in shapes else None

    def _single(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._empty(shape, torch.float32 if keeps_fp32(self.config, name) else self.dtype)
        self.targets[name].append(tensor)
        return tensor

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)
