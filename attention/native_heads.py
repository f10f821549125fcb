"""Norm of heads, rotation, query temperature and the write of K and V, in one native call over the rows of a step.

Not the product that makes q, k and v and not attention. What is computed is what models/layers.py spells out in torch,
rounded to bf16 at the same places; only the sum in a norm is added up in another order. K and V are stored in the
format of their cache group, as kvcache/scaled.py says.
Letters: T rows, H query heads, Hkv KV heads, Dh head width, R rotated elements.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from ..kvcache.storage import KVStorage
from ..native.library import function
from .native import KV_CODES

_HEAD_NORMS = {None: 0, "head": 1, "full": 2, "unit": 3}


class QkvEpilogueArgs(ctypes.Structure):
    """`struct QkvEpilogue` of native/csrc/heads.h."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                "qkv", "q", "k_cache", "v_cache", "k_scales", "v_scales", "slots", "cos", "sin", "temperature",
                "norm_weights",
            )
        ),
        *((name, ctypes.c_int64) for name in ("rows", "stride")),
        *(
            (name, ctypes.c_int32)
            for name in (
                "heads", "kv_heads", "head_dim", "value_dim", "rotary_dim", "interleaved", "head_norm",
                "norm_after_rotary", "kv_format",
            )
        ),
        ("eps", ctypes.c_float),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HeadSteps:
    """What a layer does with its heads before attention.

    Attributes:
        num_heads, num_kv_heads, head_dim: H, Hkv, Dh; V is as wide as K.
        rotary_dim: R; 0 rotates nothing.
        interleaved: pairs that turn stand side by side.
        head_norm: `head`, `full`, `unit` or None, as `models.config` calls them.
        norm_weights: [(H + Hkv) * Dh] bf16, of every head, those of q first; None for `unit` and None.
        norm_after_rotary: the norm comes last.
        eps: of the norm.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int = 0
    interleaved: bool = False
    head_norm: str | None = None
    norm_weights: torch.Tensor | None = None
    norm_after_rotary: bool = False
    eps: float = 0.0


class QkvEpilogue:
    """The call of one layer, prepared.

    Args:
        steps: what is done.
        storage: where K and V go.
        layer: decoder layer number.
    """

    def __init__(self, steps: HeadSteps, storage: KVStorage, layer: int) -> None:
        assert (steps.norm_weights is not None) == (steps.head_norm in ("head", "full")), "weights of another norm"
        self._call = function("moewe_qkv_epilogue", QkvEpilogueArgs)
        self._steps, self._storage = steps, storage
        self._weights = None if steps.norm_weights is None else steps.norm_weights.contiguous()
        pages = storage.pages(layer)
        k, v = (part.elements for part in pages)
        k_scales, v_scales = (None if part.scales is None else part.scales.data_ptr() for part in pages)
        assert k.shape[2:] == v.shape[2:] == (steps.num_kv_heads, steps.head_dim), k.shape
        self.args = QkvEpilogueArgs(
            k_cache=k.data_ptr(),
            v_cache=v.data_ptr(),
            k_scales=k_scales,
            v_scales=v_scales,
            norm_weights=None if self._weights is None else self._weights.data_ptr(),
            heads=steps.num_heads,
            kv_heads=steps.num_kv_heads,
            head_dim=steps.head_dim,
            value_dim=steps.head_dim,
            rotary_dim=steps.rotary_dim,
            interleaved=steps.interleaved,
            head_norm=_HEAD_NORMS[steps.head_norm],
            norm_after_rotary=steps.norm_after_rotary,
            kv_format=KV_CODES[k.dtype],
            eps=steps.eps,
        )

    def __call__(
        self,
        qkv: torch.Tensor,
        slot_mapping: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor] | None,
        temperature: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write K and V of all rows and return the queries.

        Args:
            qkv: [T, (H + 2 Hkv) * Dh] bf16.
            slot_mapping: [T] i64; -1 keeps nothing.
            angles: cos and sin, [T, 1, R] f32 each; None where nothing is rotated.
            temperature: [T, 1, 1] f32, factor on the queries.

        Returns:
            [T, H, Dh] bf16.
        """
        steps, args = self._steps, self.args
        assert qkv.dtype == torch.bfloat16 and qkv.is_contiguous(), (qkv.dtype, qkv.shape)
        assert qkv.shape[1] == (steps.num_heads + 2 * steps.num_kv_heads) * steps.head_dim, qkv.shape
        assert (angles is not None) == (steps.rotary_dim > 0), "angles go with a rotation"
        q = torch.empty((qkv.shape[0], steps.num_heads, steps.head_dim), dtype=torch.bfloat16)
        args.qkv, args.q, args.slots = qkv.data_ptr(), q.data_ptr(), slot_mapping.data_ptr()
        args.rows, args.stride = qkv.shape
        args.cos, args.sin = (None, None) if angles is None else (angles[0].data_ptr(), angles[1].data_ptr())
        args.temperature = None if temperature is None else temperature.data_ptr()
        self._call(args)
        return q
