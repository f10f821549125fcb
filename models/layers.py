"""The parts of a decoder layer that no expert takes part in: norms, rotary embedding, gated FFN, attention block.

Not kernels (those stand behind `attention` and `moe`) and no weights of their own: functions and small objects over
the tensors of `models.weights`. Shapes: T rows, D width, H query heads, Hkv KV heads, Dh head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..attention.batch import AttentionBatch
from ..attention.paged import paged_attention
from ..kvcache import KVStorage
from ..moe.experts import swiglu
from .config import ModelConfig, RotaryConfig
from .weights import DenseFFN, LayerWeights


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dim; the mean in fp32 (Zhang and Sennrich, 2019)."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * scale).to(x.dtype).mul_(weight)


def dense_ffn(x: torch.Tensor, weights: DenseFFN) -> torch.Tensor:
    """Return down(silu(gate(x)) * up(x)): [T, D] -> [T, D]."""
    return F.linear(swiglu(F.linear(x, weights.w13)), weights.w2)


class Rotary:
    """Rotary position embedding in the half-split form (Su et al., 2021); cos and sin are kept in fp32.

    Args:
        config: base and how many leading elements of a head rotate.
        device: of the tables.
    """

    def __init__(self, config: RotaryConfig, device: torch.device) -> None:
        self._rotary_dim = config.rotary_dim
        exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.int64).float() / config.rotary_dim
        self._inverse = (1.0 / (config.theta**exponents)).to(device)  # [rotary_dim / 2]

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of each row's position: [T, 1, rotary_dim] f32 each, both halves filled; once a step."""
        angle = positions.float()[:, None] * self._inverse  # [T, rotary_dim / 2]
        both = torch.cat([angle, angle], dim=-1)[:, None, :]
        return both.cos(), both.sin()

    def rotate(self, heads: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Rotate [T, heads, Dh] in the dtype given; elements past `rotary_dim` pass through."""
        cos, sin = angles
        turning, still = heads[..., : self._rotary_dim], heads[..., self._rotary_dim :]
        first, second = turning.chunk(2, dim=-1)
        turned = (turning * cos).add_(torch.cat([-second, first], dim=-1) * sin).to(heads.dtype)
        return turned if not still.shape[-1] else torch.cat([turned, still], dim=-1)


class AttentionBlock:
    """Attention of one layer: project, norm heads, rotate, store K and V, attend, project back.

    Args:
        config: of the model.
        weights: of the layer.
        layer: decoder layer number.
        rotary: shared by all layers.
    """

    def __init__(self, config: ModelConfig, weights: LayerWeights, *, layer: int, rotary: Rotary) -> None:
        self._weights, self._layer, self._rotary = weights, layer, rotary
        self._num_heads, self._num_kv_heads, self._head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._eps, self._qk_norm = config.norm_eps, config.qk_norm
        self._scale = config.head_dim**-0.5

    def __call__(
        self,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        storage: KVStorage,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Return what attention adds to the residual: [T, D] -> [T, D], T > 0. Writes K and V of all rows first."""
        w, num_heads, num_kv_heads = self._weights, self._num_heads, self._num_kv_heads
        qkv = F.linear(x, w.qkv, w.qkv_bias)
        q, k, v = qkv.split_with_sizes(
            [size * self._head_dim for size in (num_heads, num_kv_heads, num_kv_heads)], dim=-1
        )
        if self._qk_norm == "full":
            q, k = self._norm(q, w.q_norm), self._norm(k, w.k_norm)
        q = q.view(-1, num_heads, self._head_dim)
        k = k.view(-1, num_kv_heads, self._head_dim)
        if self._qk_norm == "head":
            q, k = self._norm(q, w.q_norm), self._norm(k, w.k_norm)
        q, k = self._rotary.rotate(q, angles), self._rotary.rotate(k, angles)
        storage.write(self._layer, k, v.view(-1, num_kv_heads, self._head_dim), batch.slot_mapping)
        out = paged_attention(q, storage, self._layer, batch, self._scale)  # [T, H, Dh]
        return F.linear(out.flatten(1), w.o, w.o_bias)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        assert weight is not None, "the family has QK-norm, but its weight is missing"
        return rms_norm(x, weight, self._eps)
