"""The parts of a decoder layer that no expert takes part in: norms, rotary embedding, gated FFN, attention block.

Not kernels (those stand behind `attention` and `moe`) and no weights of their own: functions and small objects over
the tensors of `models.weights`. Shapes: T rows, D width, H query heads, Hkv KV heads, Dh head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..attention.batch import AttentionBatch, AttentionOptions
from ..attention.paged import paged_attention
from ..kvcache import KVStorage
from ..moe.experts import swiglu
from .config import ModelConfig, RotaryConfig
from .weights import DenseFFN, LayerWeights


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dim; the mean in fp32 (Zhang and Sennrich, 2019).

    Rounded to the dtype of `x` before the weight is applied, as the models were trained: a fused product rounds
    once and turns near-ties. `weight` is [width], or [heads, width] where every head has its own.
    """
    return F.rms_norm(x, weight.shape[-1:], None, eps).mul_(weight)


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
        """Return cos and sin of each row's position, once a step: [T, 1, rotary_dim] f32, both halves filled.

        The first half of sin is negated, so that `rotate` needs no negated copy of the heads.
        """
        angle = positions.float()[:, None] * self._inverse  # [T, rotary_dim / 2]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([cos, cos], dim=-1)[:, None], torch.cat([-sin, sin], dim=-1)[:, None]

    def rotate(self, heads: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Rotate [T, heads, Dh] in fp32, rounded once; elements past `rotary_dim` pass through."""
        cos, sin = angles
        partial = heads.shape[-1] > self._rotary_dim
        wide = (heads[..., : self._rotary_dim] if partial else heads).float()
        turned = (wide * cos).addcmul_(wide.roll(self._rotary_dim // 2, -1), sin).to(heads.dtype)
        return torch.cat([turned, heads[..., self._rotary_dim :]], dim=-1) if partial else turned


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
        self._options = AttentionOptions(config.attention_scale)
        widths = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim)
        self._full_widths = widths
        self._sizes = [sum(widths), widths[1]]
        if self._qk_norm is not None:
            assert weights.q_norm is not None and weights.k_norm is not None, "QK-norm, but its weights are missing"
        if self._qk_norm == "head":  # one norm for all heads of q and k: [H + Hkv, Dh]
            assert weights.q_norm is not None and weights.k_norm is not None
            parts = (weights.q_norm.expand(config.num_heads, -1), weights.k_norm.expand(config.num_kv_heads, -1))
            self._head_norm = torch.cat(parts)

    def __call__(
        self,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        storage: KVStorage,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Return what attention adds to the residual: [T, D] -> [T, D], T > 0. Writes K and V of all rows first."""
        w, num_heads, num_kv_heads, head_dim = self._weights, self._num_heads, self._num_kv_heads, self._head_dim
        qk, v = F.linear(x, w.qkv, w.qkv_bias).split_with_sizes(self._sizes, dim=-1)
        if self._qk_norm == "full":
            qk = self._norm_full(qk)
        qk = qk.view(-1, num_heads + num_kv_heads, head_dim)  # [T, H + Hkv, Dh]
        if self._qk_norm == "head":
            qk = rms_norm(qk, self._head_norm, self._eps)
        q, k = self._rotary.rotate(qk, angles).split_with_sizes([num_heads, num_kv_heads], dim=1)
        storage.write(self._layer, k, v.view(-1, num_kv_heads, head_dim), batch.slot_mapping)
        out = paged_attention(q, storage, self._layer, batch, self._options)  # [T, H, Dh]
        return F.linear(out.view(-1, num_heads * head_dim), w.o, w.o_bias)

    def _norm_full(self, qk: torch.Tensor) -> torch.Tensor:
        """Norm over all heads of q together, and over all of k."""
        w = self._weights
        assert w.q_norm is not None and w.k_norm is not None
        q, k = qk.split_with_sizes(self._full_widths, dim=-1)
        return torch.cat([rms_norm(q, w.q_norm, self._eps), rms_norm(k, w.k_norm, self._eps)], dim=-1)
