"""Fill the weights of one rank from a checkpoint, reading only the byte ranges that this rank holds.

Not names (`name_map`), not files (`checkpoint`), not reads (`reads`), not what is held (`allocation`): this ties them.
Units: bytes. `on_progress(done, total)` is called on the calling thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..moe.wide_ep.placement import ExpertPlacement
from .allocation import Allocation, allocate_weights
from .checkpoint import Checkpoint, open_checkpoint
from .config import ModelConfig
from .dummy import fill_randomly
from .name_map import Matched, match_tensors
from .packing import pack_weights, packable_bytes
from .reads import Read, Spans, Staging, plan_piece
from .weights import ModelWeights

_log = logging.getLogger(__name__)
OnProgress = Callable[[int, int], None]


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
    """

    dtype: torch.dtype
    placement: ExpertPlacement | None = None
    rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dummy: bool = False
    seed: int = 0
    num_threads: int = 4
    pack: bool = False


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
        config: of the model.
        options: which share of it, and how.
        on_progress: told (bytes done, bytes in all) now and then.

    Raises:
        ConfigError: the checkpoint is incomplete, damaged, or of another model.
    """
    on_progress = on_progress or _quiet
    if options.dummy:
        return _make_dummy(config, options, on_progress)
    with open_checkpoint(path) as checkpoint:
        matched = match_tensors(checkpoint.tensors, config)
        allocation = _allocate(config, options)
        reads = [read for piece in matched.pieces for read in plan_piece(piece, allocation.targets)]
        reads.sort(key=lambda read: read.position)
        progress = _Progress(on_progress, sum(read.num_bytes for read in reads), allocation.weights, options)
        written = _run_reads(reads, options.num_threads, progress)
    prove_filled(allocation.weights, written)
    if options.pack:
        pack_weights(allocation.weights, progress.add)
    if options.rank == 0:
        _log_leftovers(checkpoint, matched)
    return LoadReport(
        weights=allocation.weights,
        bytes_held=allocation.weights.num_bytes,
        bytes_read=checkpoint.header_bytes + sum(read.num_bytes for read in reads),
        ignored=matched.ignored,
    )


def check_weights(path: Path, config: ModelConfig) -> None:
    """Raise the ConfigError that loading would raise for missing, unknown or misshapen tensors; reads only headers."""
    with open_checkpoint(path) as checkpoint:
        match_tensors(checkpoint.tensors, config)


def prove_filled(weights: ModelWeights, written: Spans) -> None:
    """Raise RuntimeError unless the address ranges `written` cover every byte of every tensor of `weights` once."""
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name) for name, tensor in weights.tensors())
    remaining = sorted(written, reverse=True)
    for begin, end, name in spans:
        position = begin
        while position < end and remaining and remaining[-1][0] == position:
            position = remaining.pop()[1]
        if position != end:
            raise RuntimeError(f"loading left a gap or an overlap in {name}, {position - begin} bytes from its start")
    if remaining:
        raise RuntimeError("loading wrote outside of the weights")


class _Progress:
    """Adds up what is read (or made) and then packed: both are parts of one total.

    Args:
        on_progress: told (done, total), at once and whenever something is added.
        num_bytes: to read or to make.
        weights: what is packed afterwards, if `options` say so.
        options: of loading.
    """

    def __init__(self, on_progress: OnProgress, num_bytes: int, weights: ModelWeights, options: LoadOptions) -> None:
        self._on_progress, self._done = on_progress, 0
        self._total = num_bytes + (packable_bytes(weights) if options.pack else 0)
        on_progress(0, self._total)

    def add(self, num_bytes: int) -> None:
        """Tell that so many bytes more are done."""
        self._done += num_bytes
        self._on_progress(self._done, self._total)


def _run_reads(reads: list[Read], num_threads: int, progress: _Progress) -> Spans:
    """Run all reads; returns the address ranges that they wrote."""
    staging, written = Staging(), Spans()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="load") as pool:
        futures = {pool.submit(read.run, staging): read for read in reads}
        try:
            for future in as_completed(futures):
                written += future.result()
                progress.add(futures[future].num_bytes)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return written


def _allocate(config: ModelConfig, options: LoadOptions) -> Allocation:
    return allocate_weights(config, options.placement, options.rank, dtype=options.dtype, device=options.device)


def _make_dummy(config: ModelConfig, options: LoadOptions, on_progress: OnProgress) -> LoadReport:
    allocation = _allocate(config, options)
    written = Spans()
    progress = _Progress(on_progress, allocation.weights.num_bytes, allocation.weights, options)

    def on_filled(view: torch.Tensor) -> None:
        written.append((view.data_ptr(), view.data_ptr() + view.nbytes))
        progress.add(view.nbytes)

    fill_randomly(allocation.targets, seed=options.seed, num_threads=options.num_threads, on_filled=on_filled)
    prove_filled(allocation.weights, written)
    if options.pack:
        pack_weights(allocation.weights, progress.add)
    return LoadReport(weights=allocation.weights, bytes_held=allocation.weights.num_bytes, bytes_read=0, ignored=())


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
