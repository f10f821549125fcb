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


class WarmStart:
    """Makes a rank ready for steps, in two parts: `compile` alone, then `warm_up` with all ranks of the group.

    All kernels are compiled before the first collective is begun, so that no rank waits in one, with a clock running,
    for the compiler of another; who is done tells the engine, and waits for its word.

    Args:
        config: resolved.
        forward: gets the graphs.
        exchange: of the rank.
        run_steps: runs steps on a made-up sequence and forgets them.
        max_model_len: longest sequence that KV holds.
        on_progress: told of shapes.
        tells: say how it went, not only what failed; one rank of a group does.
    """

    def __init__(
        self,
        config: EngineConfig,
        forward: StepForward,
        exchange: Exchange,
        run_steps: Callable[[], None],
        *,
        max_model_len: int,
        on_progress: OnProgress,
        tells: bool,
    ) -> None:
        self._config, self._forward, self._exchange = config, forward, exchange
        self._run_steps, self._on_progress, self._tells = run_steps, on_progress, tells
        self._graphs = make_graphs(config, forward, exchange, max_model_len)

    @torch.inference_mode()
    def compile(self) -> None:
        """Run all forms of steps on a GPU without a collective; no other rank is waited for."""
        if self._config.parallel.device == "cuda" and isinstance(self._exchange, StagedExchange):
            with self._exchange.rehearsing():
                self._run_steps()
        if self._graphs is not None:
            total = len(self._graphs.ladder.shapes)
            self._graphs.rehearse(lambda: self._on_progress(0, total, of_graphs=True))

    @torch.inference_mode()
    def warm_up(self) -> int:
        """Run steps and capture those of decode; a collective of all ranks of the group.

        Returns:
            Bytes of the device that graphs hold.
        """
        self._run_steps()
        graphs = self._graphs
        if graphs is None:
            return 0
        done, total = itertools.count(1), len(graphs.ladder.shapes)
        report = graphs.capture(lambda: self._on_progress(next(done), total, of_graphs=True))
        summary, *failed = report.lines(self._config.graphs.graph_bytes)
        if self._tells:
            log.info("%s", summary)
        for line in failed:
            log.warning("%s", line)
        self._forward.graphs = graphs
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
