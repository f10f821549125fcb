"""The parts of a decoder layer that no expert takes part in: norms and the attention block over heads of K and V.

Not latent attention (models/latent.py), not rotary tables (models/rotary.py), no kernels (those stand behind
`attention` and `moe`, and in kernels/) and no weights of their own: small objects over the tensors of `models.weights`.
What gets kernels of a GPU runs them; without, torch does the same.
Shapes: T rows, D width, H query heads, Hkv KV heads, Dh head width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..attention.batch import AttentionBatch, AttentionOptions
from ..attention.kernels.attend import triton_attention
from ..attention.kernels.heads import triton_heads
from ..attention.native_heads import HeadSteps
from ..attention.paged import paged_attention
from ..attention.tensor_parallel import TensorParallelGroup
from ..kvcache.storage import KVStorage
from ..moe.kernels.combine import ExpertRows
from ..moe.kernels.linear import linear
from ..native.gpu import GpuKernels
from .config import ModelConfig, QueryTemperature
from .kernels.norm import triton_add_normed, triton_norm
from .rotary import Angles, Rotary
from .weights import LayerWeights


class RowPositions(NamedTuple):
    """What the positions of a step's rows mean to every layer; made once a step.

    Attributes:
        angles: of the rotary embedding.
        temperature: [T, 1, 1] f32, factor on the queries of layers without rotary; None where there is none.
    """

    angles: Angles
    temperature: torch.Tensor | None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dim; the mean in fp32 (Zhang and Sennrich, 2019).

    Rounded to the dtype of `x` before the weight is applied, as the models were trained: a fused product rounds
    once and turns near-ties. `weight` is [width], or [heads, width] where every head has its own.
    """
    return F.rms_norm(x, weight.shape[-1:], None, eps).mul_(weight)


# What a block adds to the residual stream: rows, or those of experts that whoever needs them adds up on the way.
Added = torch.Tensor | ExpertRows


class Norm:
    """The norm around a block, over rows of D elements: RMSNorm, or LayerNorm with a bias (Ba et al., 2016).

    Args:
        config: says which, and eps.
        weight: [D].
        bias: [D] of a LayerNorm.
        kernels: of a GPU.
    """

    def __init__(
        self,
        config: ModelConfig,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        kernels: GpuKernels | None = None,
    ) -> None:
        assert config.norm in ("rms", "layer"), config.norm
        assert (bias is None) == (config.norm == "rms"), f"norm {config.norm!r}, but its bias says otherwise"
        self._weight, self._bias, self._eps = weight, bias, config.norm_eps
        self._multiplier, self._on_gpu = config.residual_multiplier, kernels is not None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` [T, D], normed."""
        if self._on_gpu:
            return triton_norm(x, self._weight, self._bias, eps=self._eps)
        if self._bias is None:
            return rms_norm(x, self._weight, self._eps)
        return F.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)

    def add(self, x: torch.Tensor, added: Added) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `x` [T, D] with what a block adds to it [T, D], and that normed. `x` may be changed in place."""
        if self._on_gpu:
            return x, triton_norm(x, self._weight, self._bias, eps=self._eps, added=added, multiplier=self._multiplier)
        assert isinstance(added, torch.Tensor), "without kernels nobody leaves experts to be added up"
        x = self.plus(x, added)
        return x, self(x)

    def add_normed(self, x: torch.Tensor, added: Added) -> torch.Tensor:
        """Return `x` [T, D] with what a block adds to it [T, D], normed before. `x` may be changed in place."""
        if self._on_gpu:
            triton_add_normed(x, added, self._weight, self._bias, eps=self._eps, multiplier=self._multiplier)
            return x
        assert isinstance(added, torch.Tensor), "without kernels nobody leaves experts to be added up"
        return self.plus(x, self(added))

    def plus(self, x: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """Return `x` [T, D] with what a block adds to it [T, D]."""
        return x + (added if self._multiplier == 1.0 else added * self._multiplier)


def query_temperature(config: QueryTemperature, positions: torch.Tensor) -> torch.Tensor:
    """Return the factor on the queries of each row: positions [T] -> [T, 1, 1] f32."""
    steps = ((positions.float() + 1.0) / config.floor_scale).floor()
    return (steps.log1p() * config.scale + 1.0)[:, None, None]


def attention_options(config: ModelConfig, weights: LayerWeights) -> AttentionOptions:
    """Return what a layer does with its scores."""
    assert config.sinks == (weights.sinks is not None), "sinks, but their weights are missing, or the other way round"
    return AttentionOptions(scale=config.attention_scale, score_cap=config.score_cap, sinks=weights.sinks)


def head_steps(config: ModelConfig, weights: LayerWeights, layer: int) -> HeadSteps:
    """Return what `layer` does with its heads between products, for kernels."""
    rotary = config.attention_of(layer).rotary
    norm, norm_weights = config.qk_norm, None
    if norm == "unit" and not rotary:
        norm = None
    if norm in ("head", "full"):
        assert weights.q_norm is not None and weights.k_norm is not None, "QK-norm, but its weights are missing"
        counts = (config.num_heads, config.num_kv_heads) if norm == "head" else (1, 1)
        parts = [part.expand(n, -1).flatten() for part, n in zip((weights.q_norm, weights.k_norm), counts)]
        norm_weights = torch.cat(parts)
    return HeadSteps(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rotary_dim=config.rotary.rotary_dim if rotary else 0,
        interleaved=config.rotary.interleaved,
        head_norm=norm,
        norm_weights=norm_weights,
        norm_after_rotary=config.qk_norm_after_rotary,
        eps=config.norm_eps,
    )


def attend(
    q: torch.Tensor,
    storage: KVStorage,
    layer: int,
    batch: AttentionBatch,
    options: AttentionOptions,
    kernels: GpuKernels | None,
) -> torch.Tensor:
    """Do what `paged_attention` says, with `kernels` if there are any."""
    if kernels is None:
        return paged_attention(q, storage, layer, batch, options)
    assert batch.gpu is not None, "a batch for kernels of a GPU"
    return triton_attention(q.contiguous(), storage, layer, batch.gpu, options, kernels.target)


class AttentionBlock:
    """Attention of one layer: project, norm heads, rotate, store K and V, attend, project back.

    Args:
        config: of the model.
        weights: of the layer.
        layer: decoder layer number.
        rotary: shared by all layers.
        ranks: that divide the heads with this one; None where it has them all. `config` and `weights` are its share.
        kernels: of a GPU.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: LayerWeights,
        *,
        layer: int,
        rotary: Rotary,
        ranks: TensorParallelGroup | None = None,
        kernels: GpuKernels | None = None,
    ) -> None:
        assert weights.qkv is not None, "heads of K and V, but no weights that make them"
        self._weights, self._qkv, self._layer, self._eps = weights, weights.qkv, layer, config.norm_eps
        self._num_heads, self._num_kv_heads, self._head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._options = attention_options(config, weights)
        self._rotary = rotary if config.attention_of(layer).rotary else None
        self._ranks, self._kernels = ranks, kernels
        # A norm over the heads of all ranks needs them to meet.
        self._steps = None if kernels is None or ranks is not None else head_steps(config, weights, layer)
        kv_width = config.num_kv_heads * config.head_dim
        self._sizes = [config.num_heads * config.head_dim + kv_width, kv_width]
        self._qk_norm = config.qk_norm
        if self._qk_norm == "unit" and self._rotary is None:
            self._qk_norm = None
        self._norm_after_rotary = config.qk_norm_after_rotary
        if self._qk_norm in ("head", "full"):
            assert weights.q_norm is not None and weights.k_norm is not None, "QK-norm, but its weights are missing"
            if self._qk_norm == "head":  # one norm for all heads of q and k: [H + Hkv, Dh]
                parts = (weights.q_norm.expand(config.num_heads, -1), weights.k_norm.expand(config.num_kv_heads, -1))
                self._head_norm = torch.cat(parts)

    def __call__(
        self, x: torch.Tensor, positions: RowPositions, storage: KVStorage, batch: AttentionBatch
    ) -> torch.Tensor:
        """Return what attention adds to the residual: [T, D] -> [T, D], T > 0. Writes K and V of all rows first."""
        w, qkv = self._weights, linear(x, self._qkv, self._weights.qkv_bias, self._kernels)
        q = self._queries(qkv, positions, storage, batch)  # [T, H, Dh]
        out = attend(q, storage, self._layer, batch, self._options, self._kernels)
        return linear(out.reshape(-1, self._num_heads * self._head_dim), w.o, w.o_bias, self._kernels)

    def _queries(
        self, qkv: torch.Tensor, positions: RowPositions, storage: KVStorage, batch: AttentionBatch
    ) -> torch.Tensor:
        """Write K and V of all rows and return the queries: [T, (H + 2 Hkv) * Dh] -> [T, H, Dh]."""
        temperature = positions.temperature if self._rotary is None else None
        if self._steps is not None:
            assert self._kernels is not None
            return triton_heads(
                self._steps, storage.pages(self._layer), qkv, batch.slot_mapping,
                None if self._rotary is None else positions.angles,
                temperature=temperature, target=self._kernels.target,
            )  # fmt: skip
        num_heads, num_kv_heads, head_dim = self._num_heads, self._num_kv_heads, self._head_dim
        qk, v = qkv.split_with_sizes(self._sizes, dim=-1)
        qk = qk.view(-1, num_heads + num_kv_heads, head_dim)  # [T, H + Hkv, Dh]
        if self._qk_norm is not None and not self._norm_after_rotary:
            qk = self._norm_heads(qk)
        if self._rotary is not None:
            qk = self._rotary.rotate(qk, positions.angles)
        if self._qk_norm is not None and self._norm_after_rotary:
            qk = self._norm_heads(qk)
        q, k = qk.split_with_sizes([num_heads, num_kv_heads], dim=1)
        if temperature is not None:
            q = (q * temperature).to(q.dtype)
        storage.write(self._layer, k, v.view(-1, num_kv_heads, head_dim), batch.slot_mapping)
        return q

    def _norm_heads(self, qk: torch.Tensor) -> torch.Tensor:
        """Norm each head, or all heads of q together and all of k: [T, H + Hkv, Dh]."""
        if self._qk_norm == "head":
            return rms_norm(qk, self._head_norm, self._eps)
        if self._qk_norm == "unit":
            return F.rms_norm(qk, qk.shape[-1:], None, self._eps)
        w = self._weights
        assert w.q_norm is not None and w.k_norm is not None
        weights = (w.q_norm, w.k_norm)
        parts = qk.flatten(1).split_with_sizes([weight.shape[0] for weight in weights], dim=-1)
        if self._ranks is None:
            normed = [rms_norm(part, weight, self._eps) for part, weight in zip(parts, weights)]
        else:  # over the heads of all ranks; every KV head is on equally many
            squares = torch.stack([part.float().square().mean(-1) for part in parts], dim=-1)  # [T, 2]
            factors = (self._ranks.mean(squares) + self._eps).rsqrt().unbind(-1)
            normed = [
                (part.float() * factor[:, None]).to(part.dtype).mul_(weight)
                for part, factor, weight in zip(parts, factors, weights)
            ]
        return torch.cat(normed, dim=-1).view_as(qk)
