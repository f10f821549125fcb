"""What one rank's memory can hold, reported once it has loaded; how fast it is read and multiplied, once all are warm.

Not a budget (topologies/budget.py estimates before loading) and not an allocation (runtime/worker.py).
Units: bytes, bytes/s, operations/s, blocks.
"""

from __future__ import annotations

import os
import time
from functools import cache

import torch

from ...models.config import ModelConfig
from ...models.footprint import kv_groups, model_footprint
from ...native.bandwidth import Bandwidth, llc_bytes, measure_read_bandwidth
from ...native.gpu_counters import GpuCounters, open_counters
from ...native.matrix_rate import measure_matrix_rate
from ...quant import NumberFormat, parse_kv_format
from ...telemetry import resident_of
from ...topologies import byte_budget, parse_topology
from ...topologies.hardware import available_memory_bytes
from ..config import QUICK_VARIABLE, EngineConfig
from ..kv_layout import step_limits
from ..resolve import kv_blocks

_GPU_BUFFER_BYTES = 1 << 30
_GPU_PASSES = 5
_GPU_PRODUCT = 8192  # rows and columns: 1.4 ms on an H200, launching is no part of it
_QUICK_SECONDS, _RATE_SECONDS = 0.001, 0.1


def blocks_that_fit(config: EngineConfig, model: ModelConfig, number_format: NumberFormat, device: torch.device) -> int:
    """Return how many KV blocks this rank can hold beside the weights that it has loaded."""
    groups = kv_groups(model, dtype=parse_kv_format(config.cache.kv_cache_dtype, number_format))
    limits = step_limits(config, otherwise=model.max_position_embeddings)
    if device.type == "cpu":  # `resolve` looked at the host, which all ranks share, and wrote the number down
        return kv_blocks(config.cache, groups, limits, free_bytes=0)
    free, total = torch.cuda.mem_get_info(device)
    buffers = byte_budget(
        model_footprint(model, name=config.model.model, dtype=number_format),
        parse_topology(config.parallel.topology),
        limits,
        rank_memory_bytes=total,
        kv_bytes=0,
    ).of_kind("buffers")
    left = int(total * config.cache.gpu_memory_utilization) - (total - free) - buffers
    return kv_blocks(config.cache, groups, limits, free_bytes=left)


@cache
def read_bandwidth(device: torch.device, num_ranks: int, weight_bytes: int) -> Bandwidth:
    """Return how fast this rank reads the memory that holds its weights, with `num_ranks` ranks at it together.

    Measured once for the process. The ranks share the memory of a host, so each gets its share of the ceiling. Where
    the weights of all fit its caches, which makes a ratio to the ceiling meaningless, the start is not delayed
    for more memory than comes at once.

    Args:
        device: of this rank.
        num_ranks: that measure together.
        weight_bytes: of this rank.
    """
    if device.type == "cpu":
        threads = torch.get_num_threads()
        if os.environ.get(QUICK_VARIABLE):
            return measure_read_bandwidth(threads, 0, sharers=num_ranks, pass_seconds=_QUICK_SECONDS)
        patience = {"most_fill_seconds": 0.0} if weight_bytes * num_ranks <= llc_bytes() else {}
        return measure_read_bandwidth(threads, available_memory_bytes() // num_ranks, sharers=num_ranks, **patience)
    free, _ = torch.cuda.mem_get_info(device)
    num_bytes = min(_GPU_BUFFER_BYTES, free // 4)  # KV took what it was allowed to
    buffer = torch.ones(num_bytes // 4, device=device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    best_ms = float("inf")
    for _ in range(_GPU_PASSES):
        start.record()
        buffer.sum()
        end.record()
        end.synchronize()
        best_ms = min(best_ms, start.elapsed_time(end))
    return Bandwidth(num_bytes / (best_ms * 1e-3), num_bytes, cache_resident=False)


def product_rate(device: torch.device, size: int, passes: int = _GPU_PASSES) -> float:
    """Return operations/s of the library's product of two bf16 matrices [size, size], the best of `passes`.

    A multiplication and an addition are two operations.
    """
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out, best_s = torch.empty_like(left), float("inf")
    for _ in range(1 + passes):  # the first chooses a kernel
        wait_for(device)
        began = time.perf_counter()
        torch.mm(left, right, out=out)
        wait_for(device)
        best_s = min(best_s, time.perf_counter() - began)
    return 2.0 * size**3 / best_s


def wait_for(device: torch.device) -> None:
    """Wait until `device` has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def resident_on(device: torch.device) -> int | None:
    """Return the bytes in memory of this process, or in use on its GPU, by whomever; None when they are not known."""
    if device.type != "cuda":
        return resident_of()
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


def gpu_counters(device: torch.device) -> GpuCounters | None:
    """Return what the hardware counts of `device`; None on a CPU."""
    if device.type != "cuda":
        return None
    return open_counters(f"GPU-{torch.cuda.get_device_properties(device).uuid}")


@cache
def matrix_rates(device: torch.device, num_ranks: int) -> dict[str, float]:
    """Return how fast this rank multiplies numbers in cache, by format, with `num_ranks` ranks at it together.

    Measured once for the process. Empty where nothing is known: on a CPU without native kernels.
    """
    if device.type != "cpu":  # whatever format weights are held in, products are of bf16
        return {"bfloat16": product_rate(device, _GPU_PRODUCT)}
    seconds = _QUICK_SECONDS if os.environ.get(QUICK_VARIABLE) else _RATE_SECONDS
    rate = measure_matrix_rate(torch.get_num_threads(), seconds)
    return {} if rate is None else rate.by_format()
