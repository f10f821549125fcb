"""How close does each native matrix kernel come to what this machine can do: bytes/s of few rows, operations/s of many?

A share is the time that the ceiling allows over the best time seen: bytes / bandwidth or operations / matrix rate,
whichever takes longer. Weights lie in several copies that take turns, so that no call finds its own in the cache. Each
output is compared once with fp32 torch before anything is timed. The best call counts: others may use the machine.

    python benchmarks/kernels.py --rows 1 4 16 512 --threads 2
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import records
import torch

from moewe.moe.activation import SILU
from moewe.moe.gated import ExpertWeights
from moewe.moe.native_experts import native_ffn
from moewe.native.bandwidth import measure_read_bandwidth
from moewe.native.library import native_isa, set_threads
from moewe.native.matrix_rate import measure_matrix_rate
from moewe.quant import logits, pack
from moewe.quant.linear import linear

WIDTH, FFN_WIDTH, EXPERTS, TOP_K, VOCABULARY = 1024, 512, 32, 8, 49152  # a layer of bench-1b
COPIES = 8
BUFFER_BYTES = 1 << 30
ALLOWED_ERROR = 2e-2  # largest error over the largest magnitude, bf16


@dataclass(frozen=True)
class Kernel:
    """One kernel at one number of rows: `run(i)` uses copy i of the weights, `expected` is what run(0) must return."""

    name: str
    rows: int
    run: Callable[[int], torch.Tensor]
    expected: torch.Tensor
    num_bytes: int
    operations: int


def noise(*shape: int) -> torch.Tensor:
    return (torch.randn(*shape) * shape[-1] ** -0.5).to(torch.bfloat16)


def linears(name: str, outputs: int, copies: int, product: Any) -> Callable[[int], Kernel]:
    weights = [noise(outputs, WIDTH) for _ in range(copies)]
    packed = [pack(weight) for weight in weights]
    first = weights[0].float()

    def at(rows: int) -> Kernel:
        x = torch.randn(rows, WIDTH).to(torch.bfloat16)
        out_bytes = rows * outputs * (4 if product is logits else 2)
        return Kernel(
            name, rows, lambda i: product(x, packed[i % copies]), x.float() @ first.T,
            packed[0].num_bytes + x.nbytes + out_bytes, 2 * rows * outputs * WIDTH,
        )  # fmt: skip

    return at


def experts() -> Callable[[int], Kernel]:
    plain = [(noise(EXPERTS, 2 * FFN_WIDTH, WIDTH), noise(EXPERTS, WIDTH, FFN_WIDTH)) for _ in range(COPIES)]
    packed = [ExpertWeights(w13=pack(w13, gate_up=True), w2=pack(w2)) for w13, w2 in plain]

    def at(tokens: int) -> Kernel:
        x = torch.randn(tokens, WIDTH).to(torch.bfloat16)
        slots, order = torch.rand(tokens, EXPERTS).argsort(1)[:, :TOP_K].flatten().sort(stable=True)
        row_tokens, counts = (order // TOP_K).to(torch.int32), torch.bincount(slots, minlength=EXPERTS)
        expected, start = [], 0
        for slot, count in enumerate(counts.tolist()):
            rows = x[order[start : start + count] // TOP_K].float()
            gate, up = (rows @ plain[0][0][slot].float().T).chunk(2, dim=1)
            expected.append((torch.nn.functional.silu(gate) * up) @ plain[0][1][slot].float().T)
            start += count
        read = int((counts > 0).sum()) * packed[0].bytes_per_slot
        return Kernel(
            "experts", tokens,
            lambda i: native_ffn(x, packed[i % COPIES], SILU, tokens_per_slot=counts, row_tokens=row_tokens),
            torch.cat(expected), read + x.nbytes + tokens * TOP_K * WIDTH * 2,
            2 * tokens * TOP_K * 3 * WIDTH * FFN_WIDTH,
        )  # fmt: skip

    return at


def best_seconds(kernel: Kernel, seconds: float) -> tuple[float, int]:
    """Return the shortest time of a call, and of how many: two at once, so that no clock matters."""
    best, calls, end = float("inf"), 0, time.perf_counter() + seconds
    while calls < 4 or time.perf_counter() < end:
        start = time.perf_counter()
        kernel.run(calls)
        kernel.run(calls + 1)
        best, calls = min(best, (time.perf_counter() - start) / 2), calls + 2
    return best, calls


def check(kernel: Kernel) -> None:
    """Stop when the output is wrong."""
    error = (kernel.run(0).float() - kernel.expected).abs().max() / kernel.expected.abs().max()
    if not error <= ALLOWED_ERROR:
        raise SystemExit(f"{kernel.name} of {kernel.rows} rows is wrong by {float(error):.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 128, 512])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.0, help="of each kernel at each number of rows")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if native_isa() is None:
        raise SystemExit("there are no native kernels here; `moewe doctor` says why")
    torch.manual_seed(0)
    set_threads(options.threads)
    bandwidth = measure_read_bandwidth(options.threads, BUFFER_BYTES).bytes_per_second
    measured = measure_matrix_rate(options.threads)
    assert measured is not None
    rate = measured.bf16
    print(f"{native_isa()}, {options.threads} threads: {bandwidth / 1e9:.1f} GB/s, {rate / 1e12:.2f} T operations/s")
    results: list[dict[str, Any]] = []
    families = [
        linears("linear 1024 -> 2048", 2048, 4 * COPIES, linear),
        linears("head 1024 -> 49152", VOCABULARY, 2, logits),
        experts(),
    ]
    for at in families:
        for rows in options.rows:
            kernel = at(rows)
            check(kernel)
            best, calls = best_seconds(kernel, options.seconds)
            allowed = max(kernel.num_bytes / bandwidth, kernel.operations / rate)
            print(
                f"{kernel.name:20} {rows:5} rows  {best * 1e3:8.3f} ms  {kernel.num_bytes / best / 1e9:6.1f} GB/s  "
                f"{kernel.operations / best / 1e12:6.3f} T/s  {allowed / best:5.0%} of the ceiling"
            )
            results.append({
                "kernel": kernel.name, "rows": rows, "best_seconds": best, "calls": calls, "bytes": kernel.num_bytes,
                "operations": kernel.operations, "share_of_ceiling": allowed / best,
            })  # fmt: skip
    ceilings = {
        "isa": native_isa(),
        "threads": options.threads,
        "bytes_per_second": bandwidth,
        "operations_per_second": rate,
    }
    records.write("kernels", {"ceilings": ceilings, "kernels": results}, options.out)


if __name__ == "__main__":
    main()
