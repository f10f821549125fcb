"""CUDA graphs by torch: the only file that captures. A test brings a device of its own.

Not a choice of what to capture (ladder.py) and not the step (capture.py).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch


class CapturedGraph(Protocol):
    """What was launched while it was captured, to be launched again at once."""

    def replay(self) -> None:
        """Launch it, behind what the current stream was given before."""
        ...


class GraphDevice(Protocol):
    """What capturing asks of a device."""

    def capture(self, run: Callable[[], None]) -> CapturedGraph:
        """Call `run` and keep what it launches, which then does not run. All graphs share one pool of memory.

        Raises:
            RuntimeError: something in it cannot be captured.
        """
        ...

    def wait(self) -> None:
        """Wait until the device has done all that it was given."""
        ...

    def memory_bytes(self) -> int:
        """Return the memory of the device that is in use, by whomever."""
        ...


class CudaGraphs:
    """`GraphDevice` of a GPU.

    Memory that is freed while a graph is captured goes back to the pool, for what comes later in it and for graphs that
    are captured later. So only one of them may run at a time, and what a replay leaves has to stand outside the pool.
    A capture that fails spoils no other: those behind it share a pool of their own.

    Args:
        device: of the rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> CapturedGraph:
        """Capture; see `GraphDevice.capture`."""
        graph, outside = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outside)
        collects = gc.isenabled()
        gc.disable()  # what it frees may talk to the driver, which breaks a capture
        try:
            with torch.cuda.stream(self._stream):
                # Another thread may talk to the driver meanwhile: the one that watches NCCL's collectives does.
                try:
                    graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                    run()
                    graph.capture_end()
                except BaseException:
                    self._leave(graph)
                    raise
        finally:
            if collects:
                gc.enable()
        outside.wait_stream(self._stream)
        return graph

    def wait(self) -> None:
        """Wait; see `GraphDevice.wait`."""
        torch.cuda.synchronize(self._device)

    def memory_bytes(self) -> int:
        """Return bytes in use; see `GraphDevice.memory_bytes`."""
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free)

    def _leave(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed, wherever it stands.

        `capture_end` throws for a capture that the driver has given up, and leaves torch's allocator recording for the
        pool: no other capture could begin there, and all memory would be held back as while one runs.
        """
        with suppress(RuntimeError):  # it says only that something went wrong before
            graph.capture_end()
        end, release = (getattr(torch._C, name, None) for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"))
        if end is not None and release is not None:
            with suppress(RuntimeError):  # `capture_end` got further: then the graph itself gives the pool back
                end(self._device.index, self._pool)
                release(self._device.index, self._pool)
        self._pool = torch.cuda.graph_pool_handle()  # without these functions at least this one can be used
