"""Attention over pages in one native call: K and V are read where they lie, no masks and no buckets are made.

Not the torch path (attention/paged.py, which calls this one for batches that were built for it) and no KV write. For a
CPU with native kernels, rows in bf16 and a cache in bf16, fp8 or int8. A row's bits depend neither on how its prompt
was cut into chunks nor on what else runs, on where its blocks lie or on the number of threads.
Shapes: T rows, H query heads, Hkv KV heads, Dh and Dv widths of a head of K and V, R runs of rows of one sequence.
"""

from __future__ import annotations

import ctypes
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ..kvcache.storage import KVStorage
from ..native.library import function
from .batch import AttentionBatch, AttentionOptions

KV_CODES = {torch.bfloat16: 0, torch.float8_e4m3fn: 1, torch.int8: 2}  # KvFormat of native/csrc/kv_format.h
_KINDS = {"full": 0, "latent": 0, "window": 1, "chunk": 2}
_calls: WeakKeyDictionary[KVStorage, dict[int, NativeAttention]] = WeakKeyDictionary()


class AttentionStepArgs(ctypes.Structure):
    """`struct AttentionStep` of native/csrc/attention.h."""

    _fields_ = (*((name, ctypes.c_void_p) for name in ("runs", "tables", "slots")), ("num_runs", ctypes.c_int64))


class AttentionArgs(ctypes.Structure):
    """`struct Attention` of native/csrc/attention.h."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("q", "out", "step", "k", "v", "k_scales", "v_scales", "sinks")
        ),
        *((name, ctypes.c_int64) for name in ("block_size", "k_stride", "v_stride", "window")),
        *(
            (name, ctypes.c_int32)
            for name in ("heads", "kv_heads", "head_dim", "value_dim", "kind", "kv_format")
        ),
        *((name, ctypes.c_float) for name in ("scale", "score_cap")),
    )  # fmt: skip


class NativeStep:
    """What native attention is told about the rows of a step and cache group.

    Args:
        runs: [R, 4] i64: first row, number of rows, position of the first, where its blocks begin in `tables`.
        tables: [n] i32, block tables after each other, each from the first block of its sequence on; entries of blocks
            that no row sees are not looked at.
        slot_mapping: [T] i64.

    Attributes:
        runs, tables: the same arrays.
        args: for the call; it points into them.
    """

    def __init__(self, runs: np.ndarray, tables: np.ndarray, slot_mapping: torch.Tensor) -> None:
        assert runs.dtype == np.int64 and runs.flags.c_contiguous and runs.shape[1:] == (4,), (runs.dtype, runs.shape)
        assert tables.dtype == np.int32 and tables.flags.c_contiguous, tables.dtype
        self.runs, self.tables, self._slot_mapping = runs, tables, slot_mapping
        self.args = AttentionStepArgs(runs.ctypes.data, tables.ctypes.data, slot_mapping.data_ptr(), runs.shape[0])


class NativeAttention:
    """The call of one layer, prepared.

    Args:
        storage: holds K and V.
        layer: decoder layer number.
        options: of the layer.
        num_heads: H.
    """

    def __init__(self, storage: KVStorage, layer: int, options: AttentionOptions, num_heads: int) -> None:
        self._call = function("moewe_attention", AttentionArgs)
        self.options = options
        pages = storage.pages(layer)
        k, v = (part.elements for part in pages)  # [num_blocks, block_size, Hkv, Dh], [num_blocks, block_size, Hkv, Dv]
        k_scales, v_scales = (None if part.scales is None else part.scales.data_ptr() for part in pages)
        group = storage.groups[storage.group_of(layer)]
        num_kv_heads, head_dim, value_dim = k.shape[2], k.shape[3], v.shape[3]
        assert num_heads % num_kv_heads == 0 and k.dtype == v.dtype, (num_heads, k.shape, k.dtype)
        assert options.scale > 0, options.scale
        assert num_kv_heads == 1 or v.stride(2) == value_dim, "heads of V stand side by side"
        self._sinks = None if options.sinks is None else options.sinks.float().contiguous()
        self.args = AttentionArgs(
            k=k.data_ptr(),
            v=v.data_ptr(),
            k_scales=k_scales,
            v_scales=v_scales,
            sinks=None if self._sinks is None else self._sinks.data_ptr(),
            block_size=storage.block_size,
            k_stride=k.stride(1),
            v_stride=v.stride(1),
            window=group.window,
            heads=num_heads,
            kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            kind=_KINDS[group.kind],
            kv_format=KV_CODES[k.dtype],
            scale=options.scale,
            score_cap=options.score_cap,
        )

    def __call__(self, q: torch.Tensor, step: NativeStep) -> torch.Tensor:
        """Return what each row of `q` [T, H, Dh] gets: [T, H, Dv] bf16. Every row is in one run."""
        args = self.args
        assert q.dtype == torch.bfloat16 and q.shape[1:] == (args.heads, args.head_dim), (q.dtype, q.shape)
        q = q.contiguous()
        out = torch.empty((q.shape[0], args.heads, args.value_dim), dtype=torch.bfloat16)
        args.q, args.out, args.step = q.data_ptr(), out.data_ptr(), ctypes.addressof(step.args)
        self._call(args)
        return out


def native_attention(
    q: torch.Tensor, storage: KVStorage, layer: int, batch: AttentionBatch, options: AttentionOptions
) -> torch.Tensor:
    """Do what `attention.paged.paged_attention` says, for a batch with `native`; calls are prepared once a layer."""
    assert batch.native is not None
    calls = _calls.setdefault(storage, {})
    call = calls.get(layer)
    if call is None or call.options is not options:
        call = calls[layer] = NativeAttention(storage, layer, options, q.shape[1])
    return call(q, batch.native)
