"""Attention over pages on a GPU: decode by splits at fixed positions and their sum, and flash prefill.

Not the KV write (heads.py, latent.py) and not the torch path (attention/paged.py). K and V are read where they lie, in
the format of their cache group. A row's bits depend neither on the rows beside it nor on how its prompt was cut into
runs of more than one row; splits begin at multiples of `split` tokens, whatever the batch is.
Letters: T rows, H query heads, Hkv KV heads, G = H / Hkv, Dh and Dv widths of a head of K and V, R runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...kvcache.storage import KVStorage
from ...native.gpu import GpuTarget, Launch
from ..batch import AttentionOptions
from .heads import power_of_two
from .pages import kernel_pages
from .step import GpuStep

_SPLITS_BLOCK = 8  # splits that are added up at once


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """What of a layer the choice of tiles depends on.

    Attributes:
        group: G.
        head_dim, value_dim: Dh, Dv.
        latent: V lies in K.
        itemsize: bytes of an element of q, and of tiles of K and V once they are numbers.
        one_byte: elements of K and V are stored in one.
        e4m3: and that one is e4m3, which GPUs before Ada decode by moving bits.
    """

    group: int
    head_dim: int
    value_dim: int
    latent: bool = False
    itemsize: int = 2
    one_byte: bool = False
    e4m3: bool = False

    @property
    def main(self) -> int:
        """Elements of a head of K in the first part: the largest power of two that they fill."""
        return 1 << (self.head_dim.bit_length() - 1)

    @property
    def rest(self) -> int:
        """Width of a tile of the others; 0 where there are none."""
        return max(16, power_of_two(self.head_dim - self.main)) if self.head_dim > self.main else 0

    @property
    def value_block(self) -> int:
        """Width of a tile of V."""
        return max(16, power_of_two(self.value_dim))

    @property
    def row_bytes(self) -> int:
        """Of a token's K and V in tiles."""
        return (self.main + self.rest + (0 if self.latent else self.value_block)) * self.itemsize


class AttendConfig(NamedTuple):
    """Rows and keys of a tile; `heads` of a row in a prefill tile; tokens of a split of decode; for the compiler."""

    block_m: int
    block_n: int
    heads: int
    split: int
    num_warps: int
    num_stages: int


def pick_decode(shape: AttentionShape, target: GpuTarget) -> AttendConfig:
    """Return tiles for single rows: all query heads of a KV head read K and V once, as far as registers allow."""
    wide = shape.value_block > 256
    most = 64 if not wide else 32 if target.capability >= 90 and not shape.one_byte else 16
    block_m = max(16, min(most, power_of_two(shape.group)))
    warps = 8 if block_m * shape.value_block > 64 * 64 else 4
    # A split's sums cost G * Dv * 4 bytes for `split` tokens of K and V: few where one KV head has many queries.
    split = 1024 if shape.latent else 512
    return AttendConfig(block_m, 32, block_m, split, warps, _stages(shape, block_m, 32, target))


def pick_prefill(shape: AttentionShape, target: GpuTarget) -> AttendConfig:
    """Return tiles for runs of rows: heads of a KV head side by side, so that few rows fill a tile as well."""
    block_m = 128 if shape.value_block <= 128 else 64 if shape.value_block <= 256 else 32
    # Tiles of one byte an element become numbers in registers, and Ampere's products take both sides from there.
    narrow = shape.one_byte or target.capability < 90 or shape.value_block > 128
    if shape.itemsize > 2:
        block_m, narrow = min(block_m, 64), True
    block_n = 32 if narrow and shape.row_bytes > 256 else 64
    if shape.e4m3 and not target.has_fp8:  # moving bits takes registers, which larger tiles do not leave
        block_m, block_n = min(block_m, 64), 32
    if shape.rest and target.capability < 90:  # queries of two parts stay in registers there
        block_m = min(block_m, 64)
    heads = min(16, shape.group & -shape.group)  # the largest power of two that divides them
    stages = _stages(shape, block_m, block_n, target)
    if shape.one_byte and shape.value_block > 256:  # sums of a latent fill registers: places of a third tile do not fit
        stages = min(stages, 3)
    return AttendConfig(block_m, block_n, heads, 0, 8, stages)


def _stages(shape: AttentionShape, block_m: int, block_n: int, target: GpuTarget) -> int:
    """Return the stages that keep up to three tiles of K and V in nine tenths of shared memory, beside the queries.

    Where a tile lies is itself read from memory, so the compiler takes two stages for each tile that it loads ahead.
    """
    left = target.shared_bytes * 9 // 10 - block_m * (shape.main + shape.rest) * shape.itemsize
    return 2 * max(1, min(3, left // (block_n * shape.row_bytes))) - 1


def triton_attention(
    q: torch.Tensor, storage: KVStorage, layer: int, step: GpuStep, options: AttentionOptions, target: GpuTarget
) -> torch.Tensor:
    """Let every row attend to the visible tokens of its sequence up to its own, which must be in storage already.

    Args:
        q: [T, H, Dh], contiguous.
        storage: holds K and V of `layer`.
        layer: decoder layer number.
        step: which rows read which blocks; of the cache group that `layer` is in.
        options: what the layer does with its scores.
        target: the GPU.

    Returns:
        [T, H, Dv] in the dtype of `q`.
    """
    out = q.new_empty(*q.shape[:2], storage.groups[storage.group_of(layer)].value_dim)
    for launch in attention_launches(q, out, storage, layer, step, options, target):
        launch.run()
    return out


def attention_launches(
    q: torch.Tensor,
    out: torch.Tensor,
    storage: KVStorage,
    layer: int,
    step: GpuStep,
    options: AttentionOptions,
    target: GpuTarget,
) -> Iterator[Launch]:
    """Yield the launches behind `triton_attention`, in order."""
    call = _Call(q, out, storage, layer, step, options)
    if step.num_decodes:
        yield from call.decode(pick_decode(call.shape, target), target)
    if step.num_decodes < len(step.runs):
        yield call.prefill(pick_prefill(call.shape, target), target)


class _Call:
    """What the launches of one layer have in common."""

    def __init__(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        storage: KVStorage,
        layer: int,
        step: GpuStep,
        options: AttentionOptions,
    ) -> None:
        group = storage.groups[storage.group_of(layer)]
        num_heads, head_dim = q.shape[1:]
        assert q.is_contiguous() and num_heads % group.num_kv_heads == 0 and head_dim == group.head_dim, q.shape
        assert head_dim >= 16, "tiles are 16 wide at least"
        self._q, self._out, self._step, self._options, self._group = q, out, step, options, group
        self._k, self._v = map(kernel_pages, storage.pages(layer))
        self._num_heads, self._block_size = num_heads, storage.block_size
        latent = group.kind == "latent"
        self.shape = AttentionShape(
            group=num_heads // group.num_kv_heads, head_dim=head_dim, value_dim=group.value_dim, latent=latent,
            itemsize=q.element_size(), one_byte=self._k.format != "plain", e4m3=self._k.format == "e4m3",
        )  # fmt: skip
        self._sinks = options.sinks
        assert self._sinks is None or self._sinks.dtype == torch.float32, "sinks in fp32"

    def decode(self, config: AttendConfig, target: GpuTarget) -> Iterator[Launch]:
        """Yield the launch of the splits and that of their sum."""
        from .attend_triton import combine_splits_kernel, decode_kernel

        step, shape = self._step, self.shape
        splits = -(-step.longest_decode // config.split)
        sums = (step.num_decodes, self._num_heads, splits)
        partial = self._q.new_empty((*sums, shape.value_dim), dtype=torch.float32)
        stats = self._q.new_empty((*sums, 2), dtype=torch.float32)
        yield Launch(
            kernel=decode_kernel,
            grid=(step.num_decodes, self._group.num_kv_heads * -(-shape.group // config.block_m), splits),
            arguments={**self._arguments(), "partial": partial, "stats": stats, "num_splits": splits},
            constants={**self._constants(config, target), "BLOCK_M": config.block_m, "SPLIT": config.split},
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        yield Launch(
            kernel=combine_splits_kernel,
            grid=(step.num_decodes, self._num_heads),
            arguments={
                "partial": partial, "stats": stats, "sinks": self._sinks, "out": self._out, "runs": step.runs,
                "num_heads": self._num_heads, "num_splits": splits,
            },
            constants={
                "VALUE_DIM": shape.value_dim, "VALUE_BLOCK": shape.value_block, "SPLITS_BLOCK": _SPLITS_BLOCK,
                "SPLIT": config.split, **self._seen(),
            },
        )  # fmt: skip

    def prefill(self, config: AttendConfig, target: GpuTarget) -> Launch:
        """Return the launch over runs of rows."""
        from .attend_triton import prefill_kernel

        tiles = self._step.tiles(config.block_m // config.heads)
        return Launch(
            kernel=prefill_kernel,
            grid=(len(tiles), self._group.num_kv_heads * -(-self.shape.group // config.heads)),
            arguments={**self._arguments(), "out": self._out, "sinks": self._sinks, "tiles": tiles},
            constants={**self._constants(config, target), "BLOCK_M": config.block_m, "HEADS": config.heads},
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            # Keys that all rows see and keys that some do are walked by two loops, of which only one would fuse; which
            # keys those are depends on where a prompt was cut.
            fuses_products=False,
        )

    def _arguments(self) -> dict[str, object]:
        options = self._options
        return {
            "q": self._q, "k": self._k.elements, "v": self._v.elements, "k_scales": self._k.scales,
            "v_scales": self._v.scales, "runs": self._step.runs, "tables": self._step.tables,
            "kv_heads": self._group.num_kv_heads, "group": self.shape.group, "scale": float(options.scale),
            "cap": float(options.score_cap) if options.score_cap else None,
        }  # fmt: skip

    def _constants(self, config: AttendConfig, target: GpuTarget) -> dict[str, int | str | bool]:
        shape = self.shape
        return {
            "MAIN": shape.main, "REST": shape.rest, "HEAD_DIM": shape.head_dim, "VALUE_DIM": shape.value_dim,
            "VALUE_BLOCK": shape.value_block, "V_STRIDE": shape.head_dim if shape.latent else shape.value_dim,
            "BLOCK_N": config.block_n, "BLOCK_SIZE": self._block_size,
            "SHARES_V": shape.latent and shape.value_dim == shape.main, "FORMAT": self._k.format,
            "FP8_BYTES": not target.has_fp8, **self._seen(),
        }  # fmt: skip

    def _seen(self) -> dict[str, int | str]:
        windowed = self._group.kind in ("window", "chunk")
        return {"KIND": self._group.kind if windowed else "full", "WINDOW": self._group.window}
