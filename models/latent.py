"""Multi-head latent attention (DeepSeek-AI, 2024) in its absorbed form: one latent row a token is all that is cached.

The product that would expand a latent to the keys of all heads is folded into the queries, and the one to values is
applied to what attention returns; heads of K and V never exist. One form for prefill chunks and decode rows alike, so
that how a prompt is cut cannot choose other arithmetic. Not an attention over heads (models/layers.py); with packed
weights whole layers do the same in native calls (models/native_latent.py).
Shapes: T rows, D width, H heads, C = kv_rank, R = rope_dim, N = nope_dim, V = value_dim.
"""

from __future__ import annotations

import torch

from ..attention.batch import AttentionBatch
from ..attention.kernels.latent import LatentSteps, triton_latent_rows
from ..kvcache.storage import KVStorage
from ..moe.kernels.linear import head_linear, linear
from ..native.gpu import GpuKernels
from ..quant import PackedTensor
from .config import ModelConfig
from .kernels.norm import triton_norm
from .layers import RowPositions, attend, attention_options, rms_norm
from .rotary import Rotary
from .weights import LayerWeights


class LatentAttentionBlock:
    """Latent attention of one layer: make the latent and queries, rotate, store the latent, attend, project back.

    Args:
        config: of the model; `latent` is set.
        weights: of the layer.
        layer: decoder layer number.
        rotary: shared by all layers; turns R elements.
        kernels: of a GPU.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: LayerWeights,
        *,
        layer: int,
        rotary: Rotary,
        kernels: GpuKernels | None = None,
    ) -> None:
        assert config.latent is not None and weights.latent is not None, "latent attention, but no latent weights"
        assert config.attention_of(layer).rotary and config.qk_norm is None, "not known of latent attention"
        self._latent, self._num_heads, self._layer, self._rotary = config.latent, config.num_heads, layer, rotary
        self._weights, self._o, self._o_bias = weights.latent, weights.o, weights.o_bias
        self._options = attention_options(config, weights)
        keys = weights.latent.kv_b_k  # [H, N, C], or packed as what it is multiplied as: [H, C, N]
        self._to_latent = keys if isinstance(keys, PackedTensor) else keys.transpose(1, 2)
        if kernels is not None and kernels.batch_invariant and isinstance(self._to_latent, torch.Tensor):
            self._to_latent = self._to_latent.contiguous()
        self._kernels = kernels
        shape = config.latent
        self._steps = LatentSteps(
            kv_rank=shape.kv_rank, rope_dim=shape.rope_dim, nope_dim=shape.nope_dim, norm=weights.latent.kv_a_norm,
            eps=shape.norm_eps, interleaved=config.rotary.interleaved,
        )  # fmt: skip

    def __call__(
        self, x: torch.Tensor, positions: RowPositions, storage: KVStorage, batch: AttentionBatch
    ) -> torch.Tensor:
        """Return what attention adds to the residual: [T, D] -> [T, D], T > 0. Writes latents of all rows first."""
        w, shape = self._weights, self._latent
        kv = linear(x, w.kv_a, w.kv_a_bias, self._kernels)  # [T, C + R]
        queries = self._queries(x).view(-1, self._num_heads, shape.nope_dim + shape.rope_dim)
        if self._kernels is None:
            q = self._rows(kv, queries, positions, storage, batch)
        else:
            q = self._rows_on_gpu(self._kernels, kv, queries, positions, storage, batch)
        out = attend(q, storage, self._layer, batch, self._options, self._kernels)  # [T, H, C]
        values = head_linear(out, w.kv_b_v, self._kernels)  # [T, H, V]
        return linear(values.flatten(1), self._o, self._o_bias, self._kernels)

    def _rows(
        self,
        kv: torch.Tensor,
        queries: torch.Tensor,
        positions: RowPositions,
        storage: KVStorage,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Write latents of all rows and return the queries over them: [T, C + R], [T, H, N + R] -> [T, H, C + R]."""
        shape = self._latent
        latent, k_rope = kv.split_with_sizes([shape.kv_rank, shape.rope_dim], dim=-1)
        latent = rms_norm(latent, self._weights.kv_a_norm, shape.norm_eps)  # [T, C]
        q_nope, q_rope = queries.split_with_sizes([shape.nope_dim, shape.rope_dim], dim=-1)
        # The rope part of K is one more head beside those of the queries: [T, H + 1, R].
        turned = self._rotary.rotate(torch.cat([q_rope, k_rope[:, None]], dim=1), positions.angles)
        q_rope, k_rope = turned.split_with_sizes([self._num_heads, 1], dim=1)
        storage.write(self._layer, torch.cat([latent[:, None], k_rope], dim=-1), None, batch.slot_mapping)
        q_latent = head_linear(q_nope, self._to_latent)  # [T, H, C]
        return torch.cat([q_latent, q_rope], dim=-1)

    def _rows_on_gpu(
        self,
        kernels: GpuKernels,
        kv: torch.Tensor,
        queries: torch.Tensor,
        positions: RowPositions,
        storage: KVStorage,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Do what `_rows` does with kernels."""
        shape = self._latent
        q = kv.new_empty(len(kv), self._num_heads, shape.kv_rank + shape.rope_dim)
        q[..., : shape.kv_rank] = head_linear(queries[..., : shape.nope_dim], self._to_latent, kernels)
        pages = storage.pages(self._layer)[0]
        triton_latent_rows(
            self._steps, pages, kv, queries, q, batch.slot_mapping, positions.angles, target=kernels.target
        )
        return q

    def _queries(self, x: torch.Tensor) -> torch.Tensor:
        """Return the queries of all heads, straight from `x` or through a latent of their own: [T, H * (N + R)]."""
        w = self._weights
        if w.q is not None:
            return linear(x, w.q, None, self._kernels)
        assert w.q_a is not None and w.q_a_norm is not None and w.q_b is not None, "no weights that make queries"
        latent, eps = linear(x, w.q_a, w.q_a_bias, self._kernels), self._latent.norm_eps
        if self._kernels is None:
            normed = rms_norm(latent, w.q_a_norm, eps)
        else:
            normed = triton_norm(latent, w.q_a_norm, eps=eps)
        return linear(normed, w.q_b, None, self._kernels)
