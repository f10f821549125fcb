"""The GPU that gpu_check runs on: what it is, what it reaches at best, how long launches take, kernels compiled before.

Not a list of what is run (gpu_check_values.py, gpu_check_speed.py, gpu_check_steps.py). Units: bytes, seconds.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import contextmanager
from importlib.metadata import version
from multiprocessing import get_context
from typing import TypeVar

import torch

from moewe.native.gpu import Launch, interpreting

CEILINGS = "this GPU"  # name of what says them
_COPIED = 2 << 30
_SIDE = 8192  # of the product that tells the matrix rate
_SHORTEST_S, _MOST_REPEATS = 2e-3, 20
_REPLAYS = 5
_FIRST = 2  # that are not counted: one uploads the graph, and clocks rise

_failed_captures: list[float] = []  # when

# What a builder of launches returns: one list for every repetition, over other memory each time.
Repetitions = Sequence[Sequence[Launch]]


def card() -> dict[str, str]:
    """Return what results depend on besides the sources."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": version("triton")}
    if interpreting():
        return {"card": "Triton's interpreter on a CPU", **versions}
    return {"card": torch.cuda.get_device_name(), **versions}


def ceilings() -> dict[str, float]:
    """Return what this GPU reaches: bytes/s of a copy, read and written, and operations/s of a product in bf16."""
    source = torch.empty(_COPIED, dtype=torch.uint8, device="cuda").zero_()
    copy = source.new_empty(_COPIED)
    copied = seconds_of(lambda: copy.copy_(source))
    left, right = (torch.randn(_SIDE, _SIDE, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(left)
    multiplied = seconds_of(lambda: torch.mm(left, right, out=out))
    return {
        "copy_bytes_per_second": 2 * _COPIED / copied,
        "matrix_flops_per_second": 2.0 * _SIDE**3 / multiplied,
    }


def told_ceilings(reached: Mapping[str, float]) -> str:
    """Return the same in words."""
    return (
        f"copies {reached['copy_bytes_per_second'] / 1e12:.2f} TB/s, multiplies "
        f"{reached['matrix_flops_per_second'] / 1e12:.0f} TFLOP/s in bf16"
    )


def seconds_of(call: Callable[[], object]) -> float:
    """Return the median time of `call` on the GPU, by events, without a graph."""
    for _ in range(3):
        call()
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return statistics.median(times)


def repeats_for(floor_s: float) -> int:
    """Return how often a graph shall hold what takes `floor_s` at best: until it takes a time that events can tell."""
    return max(2, min(_MOST_REPEATS, -(-int(_SHORTEST_S * 1e9) // max(1, int(floor_s * 1e9)))))


def graph_seconds(repetitions: Repetitions) -> float:
    """Return the time of one repetition: all of them in one CUDA graph, so that no launch waits for the host.

    Repetitions read other memory each, or more of it than the second-level cache holds; the median of some replays.
    """
    return callable_seconds([lambda launches=launches: [one.run() for one in launches] for launches in repetitions])


def callable_seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Return the same of calls that launch what they like on the current stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:  # compiles what is not compiled yet, too
            call()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    gc.disable()  # what it frees may talk to the driver, which breaks a capture
    try:
        with torch.cuda.graph(graph, stream=side):
            for call in calls:
                call()
    except Exception:
        _failed_captures.append(time.monotonic())
        raise
    finally:
        gc.enable()
    times = []
    for number in range(_REPLAYS + _FIRST):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if number >= _FIRST:
            times.append(start.elapsed_time(end) * 1e-3 / len(calls))
    del graph
    return statistics.median(times)


@contextmanager
def memory_given_back() -> Iterator[None]:
    """Give the memory of an item back to the driver: sizes differ much from one to the next."""
    try:
        yield
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def warm(launch: Launch) -> None:
    """Compile what `launch` runs, as a launch would, without one: into the cache that all processes share."""
    launch.kernel.warmup(
        **launch.arguments, **launch.constants, grid=launch.grid, num_warps=launch.num_warps,
        num_stages=launch.num_stages, enable_fp_fusion=launch.fuses_products,
    )  # fmt: skip


def is_sound() -> bool:
    """Return whether this process is as before what failed.

    After a fault a GPU takes nothing more of it, and a capture that broke may leave torch's allocator holding memory.
    """
    if not torch.cuda.is_available():
        return True
    if _failed_captures:
        return False
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return bool(torch.ones(1, device="cuda").item() == 1.0)
    except RuntimeError:
        return False


Job = TypeVar("Job")


def compile_ahead(
    warmed: Callable[[Job], None], jobs: Sequence[Job], most_seconds: float, processes: int | None = None
) -> None:
    """Compile a kernel for each job, the first ones first, by as many processes as there are CPUs; say what came of it.

    What is not done after `most_seconds` is compiled when it is launched.
    """
    processes, began = processes or len(os.sched_getaffinity(0)), time.monotonic()
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
    done, late = wait([pool.submit(warmed, job) for job in jobs], timeout=most_seconds)
    failed = [error for future in done if (error := future.exception()) is not None]
    for process in list((pool._processes or {}).values()) if late else []:
        process.kill()
    pool.shutdown(wait=not late, cancel_futures=True)
    print(f"  {len(done) - len(failed)} of {len(jobs)} kernels compiled by {processes} processes in "
          f"{time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)  # fmt: skip
    # What a machine lacks, all kernels lack.
    for line, times in Counter(f"{type(error).__name__}: {error}"[:300] for error in failed).items():
        print(f"  not compiled, {times} times: {line}", file=sys.stderr, flush=True)
