"""All layers of a decoder in one native call, or the attention half of one: models/decoder.py runs either, or torch.

Not kernels (native/csrc/layer.h joins them) and not the arguments of latent attention (native_latent.py). For packed
weights, bf16 rows and a cache that native attention reads. The bits are those of the same operations one by one.
Letters: T rows, D width, H query heads, Hkv KV heads, Dh head width, E experts, K top-k, S slots of this rank.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from ..attention.batch import AttentionBatch
from ..attention.native import KV_CODES, AttentionArgs, AttentionStepArgs, NativeAttention
from ..attention.native_heads import QkvEpilogue, QkvEpilogueArgs
from ..kvcache.storage import KVStorage
from ..moe.activation import SILU
from ..moe.layer import MoELayer
from ..moe.native_experts import ExpertFfnArgs, ffn_args
from ..moe.native_route import RouteArgs
from ..moe.wide_ep import Exchange, ShmExchange
from ..moe.wide_ep.exchanges.shm import ShmFaultArgs
from ..native.library import load
from ..quant import PackedTensor
from ..quant.native_linear import LinearArgs, linear_args
from ..telemetry import RankProgress, StepMarks
from ..telemetry.step_marks import ATTENTION, COMBINE, DENSE, DISPATCH, EXPERTS, ROUTING, SHARED, WAIT
from .config import ModelConfig
from .layers import RowPositions, attention_options, head_steps
from .native_latent import LatentArgs, LatentCall, is_packed, latent_widths
from .native_norm import NativeNorm, NormArgs
from .weights import LayerWeights, ModelWeights

# `enum Mark`: what each of the marks of a layer ends.
_MARKED = (ATTENTION, ROUTING, DISPATCH, WAIT, DISPATCH, EXPERTS, SHARED, WAIT, COMBINE, DENSE)


class LayerArgs(ctypes.Structure):
    """`struct Layer` of native/csrc/layer.h."""

    _fields_ = (
        ("input_norm", NormArgs),
        ("ffn_norm", NormArgs),
        ("qkv", LinearArgs),
        ("o", LinearArgs),
        ("heads", QkvEpilogueArgs),
        ("latent", LatentArgs),
        ("attention", AttentionArgs),
        ("route", RouteArgs),
        ("experts", ExpertFfnArgs),
        ("shared", ExpertFfnArgs),
        ("shared_gate", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("norm_after", "attention_group", "uses_temperature", "is_latent")),
    )


class StepArgs(ctypes.Structure):
    """`struct Step`."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "x", "added", "normed", "shared", "qkv", "q", "attended", "kv", "q_latent", "values", "cos", "sin",
                "temperature", "attention", "logits", "expert_ids", "slot_ids", "row_tokens", "rows_of", "offsets",
                "weights", "expert_rows", "tokens_per_slot", "progress", "group", "group_row_tokens", "marks",
            )
        ),
        ("bytes_sent", ctypes.c_int64),
        ("fault", ShmFaultArgs),
    )  # fmt: skip


def can_fuse(weights: ModelWeights, storage: KVStorage) -> bool:
    """Tell whether the layers of a model can be run so."""
    is_read = all(group.number_format.torch_dtype in KV_CODES for group in storage.groups)
    return is_read and load() is not None and all(map(_attention_is_packed, weights.layers))


class NativeLayers:
    """The layers of one decoder on one rank, prepared.

    Args:
        config: of the model.
        weights: packed; they outlive this object.
        storage: where K and V of this rank lie.
        moe_layers: the MoE layer of each decoder layer, None for a dense one.
        exchange: joins the ranks.
        progress: counted up inside of calls.

    Attributes:
        storage: of the layers.
        final_norm: behind the layers, for who puts them together.
        whole: `run` can do everything; else a caller puts together `attend` and FFNs.
        tokens_per_slot: [L_moe, S] i64, rows that reached each slot of each MoE layer in the last `run`.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        storage: KVStorage,
        *,
        moe_layers: Sequence[MoELayer | None],
        exchange: Exchange,
        progress: RankProgress | None,
    ) -> None:
        library = load()
        assert library is not None
        self._run_layers, self._run_half = library.moewe_layers, library.moewe_attention_half
        self._run_layers.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
        self._run_half.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)
        self._run_layers.restype = self._run_half.restype = None
        self.storage, self._config, self._exchange = storage, config, exchange
        self._moe_layers = [moe for moe in moe_layers if moe is not None]
        self._kept: list[object] = []  # what arguments point to
        self._layers = [
            self._layer(i, layer, moe) for i, (layer, moe) in enumerate(zip(weights.layers, moe_layers, strict=True))
        ]
        self._pointers = (ctypes.c_void_p * len(self._layers))(*map(ctypes.addressof, self._layers))
        self.final_norm = NativeNorm(
            config.norm,
            weights.final_norm,
            weights.final_norm_bias,
            eps=config.norm_eps,
            multiplier=config.residual_multiplier,
        )
        self._last = self.final_norm.args
        joined = not self._moe_layers or isinstance(exchange, ShmExchange) or exchange.name == "local"
        self.whole = joined and all(args.experts.slots or args.shared.slots for args in self._layers)
        self._groups = (AttentionStepArgs * len(storage.groups))()
        self._filled: Sequence[AttentionBatch] = ()  # what stands in there
        self._step = StepArgs(attention=ctypes.addressof(self._groups))
        if progress is not None:
            self._step.progress = progress.tick_address
        self._slots = len(self._moe_layers[0].tokens_per_slot) if self._moe_layers else 0
        self.tokens_per_slot = np.zeros((len(self._moe_layers), self._slots), np.int64)
        self._step.tokens_per_slot = self.tokens_per_slot.ctypes.data
        if self.whole and isinstance(exchange, ShmExchange):
            self._step.group = ctypes.addressof(exchange.group)
            self._group_row_tokens = torch.empty(exchange.most_rows, dtype=torch.int32)
            self._step.group_row_tokens = self._group_row_tokens.data_ptr()
        self._num_rows = -1  # for which there are buffers
        self._buffers: list[torch.Tensor] = []
        self._make_buffers(0)

    def run(
        self,
        x: torch.Tensor,
        positions: RowPositions | None,
        batches: Sequence[AttentionBatch],
        marks: StepMarks | None = None,
    ) -> torch.Tensor:
        """Run all layers and the final norm; `whole` says that this can be done in one call.

        Args:
            x: [T, D] bf16, changed in place.
            positions: of the rows; None for no rows.
            batches: one a cache group.
            marks: get the parts of all layers, if the step is traced.

        Returns:
            [T, D].

        Raises:
            RuntimeError: the exchange has no room for so many rows, or a rank chose a slot that does not exist.
        """
        assert self.whole
        shm = self._exchange if self._step.group and isinstance(self._exchange, ShmExchange) else None
        if shm is not None:
            shm.check_tokens(x.shape[0])
        hidden = self._begin(x, positions, batches)
        step = self._step
        ends = None if marks is None else np.zeros((len(self._layers), len(_MARKED)), np.int64)
        step.marks = None if ends is None else ends.ctypes.data
        self._run_layers(self._pointers, len(self._layers), ctypes.addressof(self._last), ctypes.addressof(step))
        if marks is not None and ends is not None:
            marks.add_layers(ends, _MARKED)
        if shm is not None:
            shm.check_fault(step.fault)
            shm.count(step.bytes_sent)
        return hidden

    def attend(
        self,
        layer: int,
        x: torch.Tensor,
        added: torch.Tensor | None,
        positions: RowPositions,
        batches: Sequence[AttentionBatch],
    ) -> torch.Tensor:
        """Run one layer up to its FFN, T > 0.

        Args:
            layer: decoder layer number.
            x: [T, D] bf16, the residual stream, changed in place.
            added: [T, D] bf16, what the layer before adds to it; None where nothing is still to be added.
            positions: of the rows.
            batches: one a cache group.

        Returns:
            [T, D], what the FFN reads: `x` itself where norms stand behind the blocks. Valid until the next call.
        """
        hidden = self._begin(x, positions, batches)
        step = self._step
        if added is not None:
            assert added.is_contiguous() and added.shape == x.shape
            step.added = added.data_ptr()
        self._run_half(self._pointers[layer], ctypes.addressof(step), added is not None)
        step.added = self._buffers[0].data_ptr()
        return x if self._config.norm_after else hidden

    def _begin(
        self, x: torch.Tensor, positions: RowPositions | None, batches: Sequence[AttentionBatch]
    ) -> torch.Tensor:
        """Fill in what changes from step to step; return where the result will stand."""
        assert x.dtype == torch.bfloat16 and x.is_contiguous(), x.dtype
        step, num_rows = self._step, x.shape[0]
        if num_rows > self._num_rows:
            self._make_buffers(num_rows)
        hidden = torch.empty_like(x)
        step.rows, step.x, step.normed = num_rows, x.data_ptr(), hidden.data_ptr()
        if positions is not None:
            step.cos, step.sin = positions.angles.cos.data_ptr(), positions.angles.sin.data_ptr()
            if positions.temperature is not None:
                step.temperature = positions.temperature.data_ptr()
        if batches is not self._filled:
            for group, batch in enumerate(batches):
                assert batch.native is not None, "a batch for native attention"
                self._groups[group] = batch.native.args
            self._filled = batches
        return hidden

    def _make_buffers(self, num_rows: int) -> None:
        """Hold buffers for `num_rows` rows of a step."""
        config, step, moe = self._config, self._step, self._config.moe
        width = config.hidden_size
        top_k = moe.routing.top_k if moe is not None else 0
        experts = -(-moe.routing.num_experts // 16) * 16 if moe is not None else 0
        sizes: dict[str, tuple[int, torch.dtype]] = {
            "added": (width, torch.bfloat16),
            "shared": (width, torch.bfloat16),
            **{name: (size, torch.bfloat16) for name, size in self._attention_widths().items()},
            "logits": (experts, torch.float32),
            **dict.fromkeys(("expert_ids", "slot_ids", "row_tokens", "rows_of"), (top_k, torch.int32)),
            "weights": (top_k, torch.float32),
            "expert_rows": (top_k * width if self.whole and not step.group else 0, torch.bfloat16),
        }
        self._buffers = [torch.empty(num_rows, size, dtype=dtype) for size, dtype in sizes.values()]
        for name, buffer in zip(sizes, self._buffers):
            setattr(step, name, buffer.data_ptr())
        if not self._num_rows > 0:
            self._offsets = torch.empty(max(1, self._slots) + 1, dtype=torch.int32)
            step.offsets = self._offsets.data_ptr()
        self._num_rows = num_rows

    def _attention_widths(self) -> dict[str, int]:
        """Return the numbers of a row in each buffer of attention."""
        config = self._config
        if config.latent is not None:
            return latent_widths(config, config.latent)
        heads = config.num_heads * config.head_dim
        return {"qkv": heads + 2 * config.num_kv_heads * config.head_dim, "q": heads, "attended": heads}

    def _layer(self, number: int, weights: LayerWeights, moe: MoELayer | None) -> LayerArgs:
        config, attention = self._config, self._config.attention_of(number)
        options = attention_options(config, weights)
        call = NativeAttention(self.storage, number, options, config.num_heads)
        self._kept += [weights, call, options]
        args = LayerArgs(
            input_norm=self._norm(weights.input_norm, weights.input_norm_bias, config.residual_multiplier),
            ffn_norm=self._norm(
                weights.post_attention_norm, weights.post_attention_norm_bias, config.residual_multiplier
            ),
            o=linear_args(weights.o, weights.o_bias),
            attention=call.args,
            norm_after=config.norm_after,
            attention_group=self.storage.group_of(number),
            uses_temperature=config.query_temperature is not None and not attention.rotary,
        )
        self._add_queries(args, number, weights)
        if moe is None:
            assert weights.dense is not None
            if isinstance(weights.dense.w13, PackedTensor):
                args.shared = ffn_args(weights.dense, SILU)
        elif (native := moe.native) is not None:
            args.route, args.experts = native.route, native.experts
            if native.shared is not None:
                args.shared = native.shared
            if native.shared_gate is not None:
                args.shared_gate = native.shared_gate.data_ptr()
            self._kept.append(native)
        return args

    def _add_queries(self, args: LayerArgs, number: int, weights: LayerWeights) -> None:
        """Fill in what makes queries, and what is kept of each row."""
        if weights.latent is not None:
            latent = LatentCall(self._config, weights.latent, self.storage, number)
            args.latent, args.is_latent = latent.args, True
            self._kept.append(latent)
            return
        heads = QkvEpilogue(head_steps(self._config, weights, number), self.storage, number)
        args.qkv, args.heads = linear_args(weights.qkv, weights.qkv_bias), heads.args
        args.heads.stride = args.qkv.out_stride
        self._kept.append(heads)

    def _norm(self, weight: torch.Tensor, bias: torch.Tensor | None, multiplier: float) -> NormArgs:
        norm = NativeNorm(self._config.norm, weight, bias, eps=self._config.norm_eps, multiplier=multiplier)
        norm.args.norms_added = self._config.norm_after
        self._kept.append(norm)
        return norm.args


def _attention_is_packed(layer: LayerWeights) -> bool:
    """Tell whether all matrices of the attention of a layer are packed."""
    makes_queries = isinstance(layer.qkv, PackedTensor) if layer.latent is None else is_packed(layer.latent)
    return makes_queries and isinstance(layer.o, PackedTensor)
