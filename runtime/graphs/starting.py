"""Graphs of a rank, made and captured while it starts.

Not what is captured (ladder.py, decode_step.py) and not how (capture.py, device.py). Units: bytes.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Protocol

import torch

from ...moe.wide_ep.exchanges import Exchange, StagedExchange, StepwiseExchange
from ..config import EngineConfig
from .capture import DecodeGraphs
from .choosing import ladder_of
from .decode_step import DecodeStep
from .device import CudaGraphs, GraphDevice
from .forward import StepForward

log = logging.getLogger(__name__)


class OnProgress(Protocol):
    """Told how far capturing is."""

    def __call__(self, done: int, total: int, /, *, of_graphs: bool = False) -> None:
        """Take the shapes that are done, and all."""
        ...


@torch.inference_mode()
def start_warm(
    config: EngineConfig,
    forward: StepForward,
    exchange: Exchange,
    warm_up: Callable[[], None],
    *,
    max_model_len: int,
    on_progress: OnProgress,
    tells: bool,
) -> int:
    """Warm a rank up and capture its decode steps; a collective of all ranks of the group.

    All kernels are compiled before the first collective is begun.

    Args:
        config: resolved.
        forward: gets the graphs.
        exchange: of the rank.
        warm_up: runs steps on a made-up sequence and forgets them.
        max_model_len: longest sequence that KV holds.
        on_progress: told of shapes.
        tells: say how it went, not only what failed; one rank of a group does.

    Returns:
        Bytes of the device that graphs hold.
    """
    graphs = make_graphs(config, forward, exchange, max_model_len)
    if config.parallel.device == "cuda" and isinstance(exchange, StagedExchange):
        with exchange.rehearsing():
            warm_up()
    if graphs is not None:
        total = len(graphs.ladder.shapes)
        graphs.rehearse(lambda: on_progress(0, total, of_graphs=True))
    warm_up()
    if graphs is None:
        return 0
    done = itertools.count(1)
    report = graphs.capture(lambda: on_progress(next(done), total, of_graphs=True))
    summary, *failed = report.lines(config.graphs.graph_bytes)
    if tells:
        log.info("%s", summary)
    for line in failed:
        log.warning("%s", line)
    forward.graphs = graphs
    return graphs.num_bytes


def graph_device(config: EngineConfig) -> GraphDevice | None:
    """Return what captures on this rank's device; None on a CPU."""
    return CudaGraphs(torch.device("cuda", torch.cuda.current_device())) if config.parallel.device == "cuda" else None


def make_graphs(
    config: EngineConfig, forward: StepForward, exchange: Exchange, max_model_len: int
) -> DecodeGraphs | None:
    """Return the graphs of a rank, none of them captured yet; None where all steps run eagerly, with a line why."""
    device = None if config.graphs.enforce_eager else graph_device(config)
    if device is None:
        return None
    decoder, storage, inputs = forward.decoder, forward.storage, forward.inputs
    if (reason := decoder.why_not_captured or inputs.why_not_captured) is not None:
        log.warning("CUDA graphs: none: %s", reason)
        return None
    name = "padded" if isinstance(exchange, StepwiseExchange) and "padded" in exchange.names else exchange.name
    ladder = ladder_of(config, name, max_model_len)
    return DecodeGraphs(ladder, device, DecodeStep(decoder, storage, inputs, exchange, ladder), exchange)
