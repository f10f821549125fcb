"""Latent attention (models/latent.py) as arguments of native calls: its products, and the rows between them.

Not a kernel (native/csrc/latent.h) and not attention. `LatentCall` is what models/native_layers.py puts into a layer;
`NativeLatentRows` is one part of it, by itself.
Letters: T rows, H heads, C = kv_rank, R = rope_dim, N = nope_dim, V = value_dim, Q = query_rank.
"""

from __future__ import annotations

import ctypes

import torch

from ..attention.native import KV_CODES
from ..kvcache.storage import KVStorage
from ..native.library import function
from ..quant import PackedTensor
from ..quant.native_linear import HeadLinearArgs, LinearArgs, head_linear_args, linear_args
from .config import LatentConfig, ModelConfig
from .native_norm import NativeNorm, NormArgs
from .rotary import Angles
from .weights import LatentWeights


class LatentRowsArgs(ctypes.Structure):
    """`struct LatentRows` of native/csrc/latent.h."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("kv", "queries", "q", "cache", "scales", "slots", "cos", "sin", "norm")
        ),
        ("rows", ctypes.c_int64),
        *(
            (name, ctypes.c_int32)
            for name in ("heads", "kv_rank", "rope_dim", "nope_dim", "interleaved", "kv_format")
        ),
        ("eps", ctypes.c_float),
    )  # fmt: skip


class LatentArgs(ctypes.Structure):
    """`struct Latent` of native/csrc/layer.h."""

    _fields_ = (
        ("kv", LinearArgs),
        ("q_down", LinearArgs),
        ("q_norm", NormArgs),
        ("q", LinearArgs),
        ("rows", LatentRowsArgs),
        ("to_latent", HeadLinearArgs),
        ("to_values", HeadLinearArgs),
    )


class NativeLatentRows:
    """The norm of the latent, the rotation of its row and of the queries, and the KV write of one layer.

    Args:
        config: of the model.
        norm: [C] bf16.
        storage: where the rows of the latent go.
        layer: decoder layer number.
    """

    def __init__(self, config: ModelConfig, norm: torch.Tensor, storage: KVStorage, layer: int) -> None:
        shape, pages = config.latent, storage.pages(layer)[0]
        assert shape is not None and config.rotary.rotary_dim == shape.rope_dim, "a latent whose rope part is rotated"
        elements = pages.elements
        assert elements.shape[2:] == (1, shape.kv_rank + shape.rope_dim), elements.shape
        self._shape, self._num_heads, self._norm, self._storage = shape, config.num_heads, norm.contiguous(), storage
        self._call = function("moewe_latent_rows", LatentRowsArgs)
        self.args = LatentRowsArgs(
            cache=elements.data_ptr(),
            scales=None if pages.scales is None else pages.scales.data_ptr(),
            norm=self._norm.data_ptr(),
            heads=config.num_heads,
            kv_rank=shape.kv_rank,
            rope_dim=shape.rope_dim,
            nope_dim=shape.nope_dim,
            interleaved=config.rotary.interleaved,
            kv_format=KV_CODES[elements.dtype],
            eps=shape.norm_eps,
        )

    def __call__(
        self, kv: torch.Tensor, queries: torch.Tensor, q: torch.Tensor, slot_mapping: torch.Tensor, angles: Angles
    ) -> None:
        """Write the latents of all rows to storage, and the rotated part of the queries to `q`.

        Args:
            kv: [T, C + R] bf16.
            queries: [T, H, N + R] bf16.
            q: [T, H, C + R] bf16, of which the last R elements of each head are written.
            slot_mapping: [T] i64; -1 keeps nothing.
            angles: of the rows.
        """
        shape, num_rows = self._shape, kv.shape[0]
        width = shape.kv_rank + shape.rope_dim
        assert kv.shape == (num_rows, width) and q.shape == (num_rows, self._num_heads, width), (kv.shape, q.shape)
        assert queries.shape == (num_rows, self._num_heads, shape.nope_dim + shape.rope_dim), queries.shape
        assert all(t.dtype == torch.bfloat16 and t.is_contiguous() for t in (kv, queries, q)), "contiguous bf16"
        args = self.args
        args.kv, args.queries, args.q = kv.data_ptr(), queries.data_ptr(), q.data_ptr()
        args.slots, args.cos, args.sin = slot_mapping.data_ptr(), angles.cos.data_ptr(), angles.sin.data_ptr()
        args.rows = num_rows
        self._call(args)


def is_packed(weights: LatentWeights) -> bool:
    """Tell whether all matrices of `weights` are packed."""
    queries = (weights.q,) if weights.q is not None else (weights.q_a, weights.q_b)
    return all(isinstance(m, PackedTensor) for m in (*queries, weights.kv_a, weights.kv_b_k, weights.kv_b_v))


class LatentCall:
    """What stands in a layer's arguments; keeps alive what they point to.

    Args:
        config: of the model.
        weights: of the layer, packed.
        storage: where the rows of the latent go.
        layer: decoder layer number.
    """

    def __init__(self, config: ModelConfig, weights: LatentWeights, storage: KVStorage, layer: int) -> None:
        shape = config.latent
        assert shape is not None and is_packed(weights), "latent attention, packed"
        assert isinstance(weights.kv_b_k, PackedTensor) and isinstance(weights.kv_b_v, PackedTensor)
        self._rows = NativeLatentRows(config, weights.kv_a_norm, storage, layer)
        query, width = shape.nope_dim + shape.rope_dim, shape.kv_rank + shape.rope_dim
        self.args = LatentArgs(
            kv=linear_args(weights.kv_a, weights.kv_a_bias),
            q=linear_args(weights.q if weights.q is not None else weights.q_b, None),
            rows=self._rows.args,
            to_latent=_heads(weights.kv_b_k, query, width),
            to_values=_heads(weights.kv_b_v, shape.kv_rank, shape.value_dim),
        )
        if weights.q is None:
            assert weights.q_a_norm is not None, "no weights that norm the latent of queries"
            self._q_norm = NativeNorm("rms", weights.q_a_norm, eps=shape.norm_eps)
            self.args.q_down = linear_args(weights.q_a, weights.q_a_bias)
            self.args.q_norm = self._q_norm.args


def latent_widths(config: ModelConfig, shape: LatentConfig) -> dict[str, int]:
    """Return the numbers of a row in each buffer of a step, by its name in `struct Step`."""
    return {
        "qkv": config.num_heads * (shape.nope_dim + shape.rope_dim),
        "q": config.num_heads * (shape.kv_rank + shape.rope_dim),
        "attended": config.num_heads * shape.kv_rank,
        "kv": shape.kv_rank + shape.rope_dim,
        "q_latent": shape.query_rank,
        "values": config.num_heads * shape.value_dim,
    }


def _heads(weight: PackedTensor, x_width: int, out_width: int) -> HeadLinearArgs:
    """Of heads that stand side by side in rows, each so many elements wide."""
    heads = weight.shape[0]
    return head_linear_args(weight, x_strides=(heads * x_width, x_width), out_strides=(heads * out_width, out_width))
