"""The decode steps of one rank as graphs: all of them captured at start, one of them replayed in a step.

Not a choice (ladder.py) and not the step itself, which comes in as a function over static inputs. Capturing is a
collective: all ranks of a group have the same ladder and go through it in the same order.
Shapes: R rows of a graph, T of them filled, D width, V vocabulary. Units: bytes, seconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from ...moe.wide_ep.exchanges import Exchange, StagedExchange, Traffic
from .device import CapturedGraph, GraphDevice
from .ladder import GraphLadder, GraphShape

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTensors:
    """What a step of R rows leaves on the device, in memory that the next step of any shape fills.

    Attributes:
        hidden: [R, D], after the final norm.
        logits: [R, V] f32.
        best: [R] i64, where the largest of each row of logits stands.
        finite, well: [R] bool, rows of logits and of hidden that hold only finite numbers.
    """

    hidden: torch.Tensor
    logits: torch.Tensor
    best: torch.Tensor
    finite: torch.Tensor
    well: torch.Tensor

    def first(self, num_rows: int) -> StepTensors:
        """Return the first rows of all: views."""
        return self._each(lambda tensor: tensor[:num_rows])

    def room(self) -> StepTensors:
        """Return memory for as much."""
        return self._each(torch.empty_like)

    def copy_(self, other: StepTensors) -> None:
        """Take over what `other` of the same shapes holds."""
        for place, new in zip(self._all, other._all, strict=True):
            place.copy_(new)

    @property
    def _all(self) -> tuple[torch.Tensor, ...]:
        return self.hidden, self.logits, self.best, self.finite, self.well

    def _each(self, make: Callable[[torch.Tensor], torch.Tensor]) -> StepTensors:
        hidden, logits, best, finite, well = map(make, self._all)
        return StepTensors(hidden=hidden, logits=logits, best=best, finite=finite, well=well)


class CapturableStep(Protocol):
    """One decode step over static inputs: nothing in it looks at a value, and nothing asks for memory of the host."""

    def empty(self) -> None:
        """Fill no row: from now on all of them stand for nothing, and no KV is written."""
        ...

    def __call__(self, shape: GraphShape) -> StepTensors:
        """Launch the step for `shape` on the current stream."""
        ...


@dataclass(frozen=True, kw_only=True)
class CaptureReport:
    """What capturing came to.

    Attributes:
        num_graphs: that can be replayed.
        num_bytes: of the device that they took.
        seconds: that it lasted.
        failed: of each shape that runs eagerly, why.
    """

    num_graphs: int
    num_bytes: int
    seconds: float
    failed: dict[GraphShape, str]

    def lines(self, budget_bytes: int) -> list[str]:
        """Return what to say at start; `budget_bytes` were set aside."""
        said = [
            f"CUDA graphs: {self.num_graphs} captured in {self.seconds:.1f} s, {self.num_bytes / 2**20:,.0f} MiB "
            f"({budget_bytes / 2**20:,.0f} MiB were set aside)"
        ]
        reasons: dict[str, list[GraphShape]] = {}
        for shape, reason in self.failed.items():
            reasons.setdefault(reason, []).append(shape)
        for reason, shapes in reasons.items():
            more = f" and {len(shapes) - 1} more" if len(shapes) > 1 else ""
            said.append(f"CUDA graphs: {shapes[0]}{more} cannot be captured and run eagerly: {reason}")
        return said


@dataclass(frozen=True, kw_only=True, eq=False)
class _Held:
    graph: CapturedGraph
    tensors: StepTensors
    traffic: Traffic


class DecodeGraphs:
    """All graphs of one rank.

    Args:
        ladder: what to capture.
        device: that captures.
        step: what is captured.
        exchange: of experts; it counts what travels.
        clock: monotonic seconds.

    Attributes:
        num_bytes: of the device that graphs hold.
    """

    def __init__(
        self,
        ladder: GraphLadder,
        device: GraphDevice,
        step: CapturableStep,
        exchange: Exchange,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ladder, self.num_bytes = ladder, 0
        self._device, self._step, self._clock = device, step, clock
        self._staged = exchange if isinstance(exchange, StagedExchange) else None
        self._graphs: dict[GraphShape, _Held] = {}

    def rehearse(self, on_shape: Callable[[], None]) -> None:
        """Run every shape once without a collective, so that all kernels are compiled before ranks wait for each other.

        Args:
            on_shape: called after each.

        Raises:
            RuntimeError: a step does not run; names the shape.
        """
        quiet: AbstractContextManager[None] = nullcontext() if self._staged is None else self._staged.rehearsing()
        with quiet:
            self._run_each(on_shape)

    def capture(self, on_shape: Callable[[], None]) -> CaptureReport:
        """Capture every shape, the largest first, each after a run of it with all ranks; no row is filled.

        One that cannot be captured runs eagerly from then on: what it sends is the same, so other ranks need not know.

        Args:
            on_shape: called after each.

        Raises:
            RuntimeError: a step does not run at all; names the shape.
        """
        began, before = self._clock(), self._device.memory_bytes()
        failed: dict[GraphShape, str] = {}
        self._run_each(on_shape, failed)
        self._device.wait()
        self.num_bytes = max(0, self._device.memory_bytes() - before)
        return CaptureReport(
            num_graphs=len(self._graphs), num_bytes=self.num_bytes, seconds=self._clock() - began, failed=failed
        )

    def holds(self, shape: GraphShape) -> bool:
        """Tell whether `shape` can be replayed."""
        return shape in self._graphs

    def replay(self, shape: GraphShape) -> StepTensors:
        """Launch the graph of `shape`, which must be held, over what its static inputs hold by then.

        What its exchange sends is booked; what else a step counts is the caller's business.
        """
        held = self._graphs[shape]
        held.graph.replay()
        if self._staged is not None:
            self._staged.repeat(held.traffic)
        return held.tensors

    def _run_each(self, on_shape: Callable[[], None], failed: dict[GraphShape, str] | None = None) -> None:
        """Run all shapes; with `failed` capture each after its run, and note there which could not be."""
        for shape in self.ladder.shapes:
            self._step.empty()
            try:
                self._step(shape)
                self._device.wait()
            except Exception as error:
                raise RuntimeError(f"a decode step of {shape} does not run: {_first_line(error)}") from error
            if failed is not None and (reason := self._capture(shape)) is not None:
                failed[shape] = reason
            on_shape()

    def _capture(self, shape: GraphShape) -> str | None:
        """Capture one shape; return why not, if it cannot be."""
        made: list[StepTensors] = []
        self._take_traffic()
        try:
            graph = self._device.capture(lambda: made.append(self._step(shape)))
        except RuntimeError as error:  # of torch and of the driver; out of memory is one
            self._take_traffic()
            return _first_line(error)
        self._graphs[shape] = _Held(graph=graph, tensors=made[0], traffic=self._take_traffic())
        return None

    def _take_traffic(self) -> Traffic:
        return Traffic() if self._staged is None else self._staged.take_traffic()


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
