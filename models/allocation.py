"""The tensors of one rank before anything is in them, and for every parameter the views that it fills.

Not reading: `loading` and `dummy` write through the views. Fused tensors (qkv, w13) exist once and are filled in parts.
Letters: D width, H query heads, Hkv KV heads, Dh head width, F FFN width, E experts, S local expert slots.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from ..moe.gated import ExpertWeights
from ..moe.wide_ep.placement import ExpertPlacement
from ..quant import Matrix, QuantTensor, empty_matrix
from ..quant.formats import torch_dtype
from .config import LatentConfig, ModelConfig, MoEConfig
from .parameters import (
    EMBEDDING,
    FINAL_NORM,
    FINAL_NORM_BIAS,
    HEAD,
    HEAD_BIAS,
    PROJECTIONS,
    ROUTER,
    SELECTION_BIAS,
    SINKS,
    Parameter,
    Parameters,
    global_parameters,
    layer_parameters,
    layer_prefix,
    scheme_of,
)
from .tensor_names import EXPERT
from .weights import DenseFFN, LatentWeights, LayerWeights, ModelWeights, MoEWeights

Targets = dict[str, list[torch.Tensor]]
_Gated = TypeVar("_Gated", DenseFFN, ExpertWeights)


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
    part = WeightParts(config, placement, rank, dtype=dtype, device=device)
    weights, targets = part.ends()
    for layer in range(config.num_layers):
        layer_weights, layer_targets = part.layer(layer)
        weights.layers.append(layer_weights)
        targets |= layer_targets
    return Allocation(weights=weights, targets=targets)


class WeightParts:
    """Allocates what `rank` holds, part by part, each with the way into it; for arguments see `allocate_weights`."""

    def __init__(
        self,
        config: ModelConfig,
        placement: ExpertPlacement | None,
        rank: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._config, self._placement, self._rank = config, placement, rank
        self._dtype, self._device = dtype, device

    def ends(self) -> tuple[ModelWeights, Targets]:
        """Return everything but the layers."""
        targets: Targets = defaultdict(list)
        whole = _Allocator(
            parameters=global_parameters(self._config), prefix="", dtype=self._dtype, device=self._device,
            targets=targets,
        )  # fmt: skip
        embedding = whole.single(EMBEDDING)
        weights = ModelWeights(
            embedding=embedding,
            head=embedding if self._config.head_tied else whole.single(HEAD),
            head_bias=whole.optional(HEAD_BIAS),
            final_norm=whole.single(FINAL_NORM),
            final_norm_bias=whole.optional(FINAL_NORM_BIAS),
            layers=[],
        )
        return weights, dict(targets)

    def layer(self, layer: int) -> tuple[LayerWeights, Targets]:
        """Return layer number `layer`."""
        targets: Targets = defaultdict(list)
        return self._inside(layer, self._experts(layer), targets).layer_weights(), dict(targets)

    def experts(self, layer: int, experts: Sequence[int]) -> tuple[ExpertWeights, Targets]:
        """Return slots for `experts` of layer number `layer`, whatever the placement says."""
        targets: Targets = defaultdict(list)
        return self._inside(layer, experts, targets).expert_weights(), dict(targets)

    def _inside(self, layer: int, experts: Sequence[int], targets: Targets) -> _LayerAllocator:
        return _LayerAllocator(
            parameters=layer_parameters(self._config, layer),
            prefix=layer_prefix(layer),
            dtype=self._dtype,
            device=self._device,
            targets=targets,
            config=self._config,
            layer=layer,
            experts=experts,
        )

    def _experts(self, layer: int) -> Sequence[int]:
        config = self._config
        if config.moe is None or not config.is_moe(layer):
            return ()
        if self._placement is None:
            return range(config.moe.routing.num_experts)
        return list(map(int, self._placement.local_experts(self._rank, config.moe_layers.index(layer))))


@dataclass(kw_only=True)
class _Allocator:
    parameters: Parameters
    prefix: str
    dtype: torch.dtype
    device: torch.device
    targets: dict[str, list[torch.Tensor]]

    def single(self, name: str) -> torch.Tensor:
        parameter = self.parameters[name]
        tensor = self.empty(parameter.shape, parameter)
        self.targets[self.prefix + name].append(tensor)
        return tensor

    def optional(self, name: str) -> torch.Tensor | None:
        return self.single(name) if name in self.parameters else None

    def empty(self, shape: tuple[int, ...], parameter: Parameter) -> torch.Tensor:
        dtype = self.dtype if parameter.dtype is None else torch_dtype(parameter.dtype)
        if self.device.type == "cpu":
            return empty_matrix(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=self.device)


@dataclass(kw_only=True)
class _LayerAllocator(_Allocator):
    config: ModelConfig
    layer: int
    experts: Sequence[int]

    def layer_weights(self) -> LayerWeights:
        config = self.config
        qkv = [f"self_attn.{p}_proj" for p in "qkv"]
        is_moe = config.moe is not None and config.is_moe(self.layer)
        return LayerWeights(
            input_norm=self.single("input_layernorm.weight"),
            input_norm_bias=self.optional("input_layernorm.bias"),
            qkv=self._matrix(qkv) if config.latent is None else None,
            qkv_bias=self._bias(qkv) if config.latent is None else None,
            latent=self._latent(config.latent) if config.latent is not None else None,
            o=self._matrix(["self_attn.o_proj"]),
            o_bias=self._bias(["self_attn.o_proj"]),
            q_norm=self.optional("self_attn.q_norm.weight"),
            k_norm=self.optional("self_attn.k_norm.weight"),
            sinks=self.optional(SINKS),
            post_attention_norm=self.single("post_attention_layernorm.weight"),
            post_attention_norm_bias=self.optional("post_attention_layernorm.bias"),
            dense=None if is_moe else self._gated(DenseFFN, "mlp"),
            moe=self._moe(config.moe) if is_moe and config.moe is not None else None,
        )

    def _latent(self, latent: LatentConfig) -> LatentWeights:
        has_rank = latent.query_rank > 0
        return LatentWeights(
            q=None if has_rank else self._matrix(["self_attn.q_proj"]),
            q_a=self._matrix(["self_attn.q_a_proj"]) if has_rank else None,
            q_a_bias=self._bias(["self_attn.q_a_proj"]) if has_rank else None,
            q_a_norm=self.optional("self_attn.q_a_layernorm.weight"),
            q_b=self._matrix(["self_attn.q_b_proj"]) if has_rank else None,
            kv_a=self._matrix(["self_attn.kv_a_proj"]),
            kv_a_bias=self._bias(["self_attn.kv_a_proj"]),
            kv_a_norm=self.single("self_attn.kv_a_layernorm.weight"),
            kv_b_k=self.single("self_attn.kv_b_k.weight"),
            kv_b_v=self.single("self_attn.kv_b_v.weight"),
        )

    def _moe(self, moe: MoEConfig) -> MoEWeights:
        return MoEWeights(
            router=self.single(ROUTER),
            router_bias=self.optional("mlp.router.bias"),
            selection_bias=self.optional(SELECTION_BIAS),
            experts=self.expert_weights(),
            shared=self._gated(DenseFFN, "mlp.shared") if moe.shared_width else None,
            shared_gate=self.optional("mlp.shared_gate.weight"),
        )

    def expert_weights(self) -> ExpertWeights:
        """Allocate the routed experts."""
        return self._gated(ExpertWeights, EXPERT)

    def _gated(self, kind: type[_Gated], prefix: str) -> _Gated:
        gate, up, down = (f"{prefix}.{projection}" for projection in PROJECTIONS)
        return kind(
            w13=self._matrix([gate, up]), w2=self._matrix([down]), b13=self._bias([gate, up]), b2=self._bias([down])
        )

    def _matrix(self, modules: list[str]) -> Matrix:
        """Allocate one matrix of modules one below the other, quantised as config.json says."""
        scheme, names = scheme_of(self.config, self.layer, modules), [f"{module}.weight" for module in modules]
        data = self._fused(names)
        if scheme is None:
            return data
        parts = [self.parameters[name] for name in names]
        return QuantTensor(
            data=data,
            scales=self._fused([f"{module}.weight_scale" for module in modules]),
            scheme=scheme,
            shape=(*data.shape[:-1], data.shape[-1] * parts[0].packed),
            sections=tuple(part.shape[0] for part in parts),
        )

    def _bias(self, modules: list[str]) -> torch.Tensor | None:
        names = [f"{module}.bias" for module in modules]
        return self._fused(names) if names[0] in self.parameters else None

    def _fused(self, names: list[str]) -> torch.Tensor:
        """Allocate parameters one below the other in one tensor, [S, ...] of local experts where names hold `#`."""
        parts = [self.parameters[name] for name in names]
        rows = [part.shape[0] for part in parts]
        shape = (sum(rows), *parts[0].shape[1:])
        if "#" in names[0]:
            tensor = self.empty((len(self.experts), *shape), parts[0])
            places = list(zip(map(str, self.experts), tensor.unbind()))
        else:
            tensor = self.empty(shape, parts[0])
            places = [("", tensor)]
        for number, place in places:
            for name, view in zip(names, torch.split(place, rows)):
                self.targets[self.prefix + name.replace("#", number)].append(view)
        return tensor
