"""Fill the weights of one rank from a checkpoint, reading only the byte ranges that this rank holds.

Not names (`name_map`), not files (`checkpoint`), not reads (`filling`), not what is held (`allocation`).
Weights that are to be quantised are read layer by layer, so that no more than one of them is held as stored.
Units: bytes. `on_progress(done, total)` is called on the calling thread.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..attention.tensor_parallel import ALL_HEADS, HeadShare
from ..moe.wide_ep.placement import ExpertPlacement
from ..quant import WeightScheme
from .allocation import WeightParts, allocate_weights
from .checkpoint import Checkpoint, open_checkpoint
from .config import ConfigError, ModelConfig
from .filling import Files, OnProgress, Progress, Random, Source
from .head_shares import cut_pieces, head_cuts, local_config
from .name_map import Matched, match_tensors
from .packing import pack_weights, packable_bytes, quantize_head, quantize_layer
from .reads import Spans
from .weights import ModelWeights, tensors_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Which share of the weights to hold, and how.

    Attributes:
        dtype: of the weights held (what its family keeps in fp32 stays fp32, quantised matrices stay as stored).
        placement: which expert slots a rank owns; None holds all experts (or the model is dense).
        rank: in the expert-parallel group.
        device: where they are held.
        dummy: make random weights from the config alone instead of reading a checkpoint.
        seed: of dummy weights.
        num_threads: how many read (or fill) at once, at least 1.
        pack: put matrices into the tiles of native kernels; `quant.can_pack` says whether that may be.
        scheme: quantise those matrices to it, and the head to int8; only with `pack`.
        share: of the heads, where the ranks of an attention replica divide them.
    """

    dtype: torch.dtype
    placement: ExpertPlacement | None = None
    rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dummy: bool = False
    seed: int = 0
    num_threads: int = 4
    pack: bool = False
    scheme: WeightScheme | None = None
    share: HeadShare = ALL_HEADS


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What loading did.

    Attributes:
        weights: filled, every byte of them.
        bytes_held: of all tensors of this rank, packed where that was asked for.
        bytes_read: from the weight files, headers included.
        ignored: names of stored tensors that nothing needed.
    """

    weights: ModelWeights
    bytes_held: int
    bytes_read: int
    ignored: tuple[str, ...]


def load_weights(
    path: Path, config: ModelConfig, options: LoadOptions, *, on_progress: OnProgress | None = None
) -> LoadReport:
    """Load what one rank holds.

    Args:
        path: model folder; not read for dummy weights.
        config: of the whole model.
        options: which share of it, and how.
        on_progress: told (bytes done, bytes in all) now and then.

    Raises:
        ConfigError: the checkpoint is incomplete, damaged, or of another model.
    """
    on_progress = on_progress or _quiet
    own, cuts = local_config(config, options.share), head_cuts(config, options.share)
    if options.dummy:
        weights, _ = _hold(own, options, Random(options.seed, options.num_threads, cuts), on_progress)
        return LoadReport(weights=weights, bytes_held=weights.num_bytes, bytes_read=0, ignored=())
    with open_checkpoint(path) as checkpoint:
        matched = match_tensors(checkpoint.tensors, config)
        files = Files(cut_pieces(matched.pieces, cuts), options.num_threads)
        weights, bytes_read = _hold(own, options, files, on_progress)
    if options.rank == 0:
        _log_leftovers(checkpoint, matched)
    return LoadReport(
        weights=weights,
        bytes_held=weights.num_bytes,
        bytes_read=checkpoint.header_bytes + bytes_read,
        ignored=matched.ignored,
    )


def prove_filled(weights: object, written: Spans) -> None:
    """Raise RuntimeError unless the address ranges `written` cover every byte of every tensor in a record once."""
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name) for name, tensor in tensors_of(weights))
    remaining = sorted(written, reverse=True)
    for begin, end, name in spans:
        position = begin
        while position < end and remaining and remaining[-1][0] == position:
            position = remaining.pop()[1]
        if position != end:
            raise RuntimeError(f"loading left a gap or an overlap in {name}, {position - begin} bytes from its start")
    if remaining:
        raise RuntimeError("loading wrote outside of the weights")


def _hold(
    config: ModelConfig, options: LoadOptions, source: Source, on_progress: OnProgress
) -> tuple[ModelWeights, int]:
    """Return the weights, filled and packed, and the bytes that came from `source`."""
    if options.scheme is not None:
        return _hold_quantized(config, options, options.scheme, source, on_progress)
    allocation = allocate_weights(config, options.placement, options.rank, dtype=options.dtype, device=options.device)
    num_bytes = source.num_bytes(allocation.targets)
    progress = Progress(on_progress, num_bytes + (packable_bytes(allocation.weights) if options.pack else 0))
    prove_filled(allocation.weights, source.fill(allocation.targets, progress))
    if options.pack:
        pack_weights(allocation.weights, progress.add)
    return allocation.weights, num_bytes


def _hold_quantized(
    config: ModelConfig, options: LoadOptions, scheme: WeightScheme, source: Source, on_progress: OnProgress
) -> tuple[ModelWeights, int]:
    """The same part by part, each quantised before the next one takes memory."""
    if config.quantization is not None:
        raise ConfigError(
            f"quantization={scheme.kind}: the checkpoint is quantised already ({config.quantization.scheme.kind}); "
            "leave quantization out, or use the bf16 weights"
        )
    assert options.pack, "only native kernels multiply what is quantised here"
    planned = allocate_weights(
        config, options.placement, options.rank, dtype=options.dtype, device=torch.device("meta")
    )
    num_bytes = source.num_bytes(planned.targets)
    progress = Progress(on_progress, num_bytes + packable_bytes(planned.weights))
    parts = WeightParts(config, options.placement, options.rank, dtype=options.dtype, device=options.device)
    weights, targets = parts.ends()
    prove_filled(weights, source.fill(targets, progress))
    del targets  # it holds what a head was made of
    quantize_head(weights, progress.add)
    for number in range(config.num_layers):
        layer, targets = parts.layer(number)
        prove_filled(layer, source.fill(targets, progress))
        targets.clear()
        quantize_layer(layer, scheme, progress.add)
        weights.layers.append(layer)
    return weights, num_bytes


def _log_leftovers(checkpoint: Checkpoint, matched: Matched) -> None:
    if checkpoint.strays:
        _log.info("weight files that no index names were left alone: %s", ", ".join(map(ascii, checkpoint.strays)))
    if matched.ignored:
        shown = ", ".join(map(ascii, matched.ignored[:3]))
        _log.info("%d stored tensors that nothing needs were left alone: %s ...", len(matched.ignored), shown)
    if matched.padded:
        shown = ", ".join(map(ascii, matched.padded))
        _log.info("rows past vocab_size were left alone in padded tensors: %s", shown)


def _quiet(done: int, total: int) -> None:
    """Tell nobody."""
