"""How much memory does a rank of bench-1b hold at its peak, beside its weights and its pool of KV, by format?

Each format is served once, on its own: `moewe serve` loads it, one prompt of 512 tokens and 32 requests together run,
and then the largest resident set that each process ever had (the kernel's count) is compared with what it must hold.
Wanted of a rank: at most 1.15 x (weights + KV pool) + 600 MB. Units: bytes; MB are millions.

    python benchmarks/peak_memory.py --variants bf16 int8 int4
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import records
from bench_1b import PREFILL_TOKENS, PROMPT_TOKENS, checkpoint, prompts

KV_BYTES = 1 << 30
START_S = 600.0


def peak_bytes(pid: int) -> int:
    """Return the largest resident set of a process so far."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def held(metrics: str, name: str) -> int:
    """Return the sum of a gauge over its labels."""
    return sum(int(float(value)) for value in re.findall(rf"^{name}{{[^}}]*}} (\S+)$", metrics, re.MULTILINE))


class Server:
    """A server of one format, from start to end."""

    def __init__(self, path: Path, variant: str, threads: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        quantization = [] if variant == "bf16" else ["--quantization", variant]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moewe", "serve", str(path), "--port", self.url.rpartition(":")[2], *quantization,
             "--kv-cache-memory-bytes", str(KV_BYTES), "--max-model-len", "1024", "--skip-tokenizer-init",
             "--log-level", "warning"],
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip
        end = time.monotonic() + START_S
        while True:
            try:
                self.get("/ready")
                return
            except OSError:
                if self.process.poll() is not None or time.monotonic() > end:
                    self.close()
                    raise SystemExit(f"{variant}: the server did not get ready") from None
                time.sleep(0.5)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return str(answer.read().decode())

    def complete(self, ids: list[int]) -> None:
        body = {"model": json.loads(self.get("/v1/models"))["data"][0]["id"], "prompt": ids, "max_tokens": 32,
                "temperature": 0, "ignore_eos": True, "return_token_ids": True}  # fmt: skip
        request = urllib.request.Request(
            self.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            made = json.load(answer)["usage"]["completion_tokens"]
        if made != 32:
            raise SystemExit(f"{made} tokens came instead of 32")

    def close(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)


def measure(path: Path, variant: str, threads: int) -> dict[str, Any]:
    """Serve `variant` and return what its processes held at most."""
    server = Server(path, variant, threads)
    try:
        server.complete(prompts(1, PREFILL_TOKENS)[0])
        with ThreadPoolExecutor(32) as pool:
            list(pool.map(server.complete, prompts(32, PROMPT_TOKENS)))
        metrics = server.get("/metrics")
        processes = psutil.Process(server.process.pid).children(recursive=True)
        rank = max(peak_bytes(process.pid) for process in processes)
        others = peak_bytes(server.process.pid) + sum(peak_bytes(process.pid) for process in processes) - rank
    finally:
        server.close()
    weights, kv = held(metrics, "moewe_weight_kind_bytes"), held(metrics, "moewe_kv_bytes")
    allowed = 1.15 * (weights + kv) + 600e6
    print(
        f"{variant:>5}: rank {rank / 1e6:.0f} MB at its peak; weights {weights / 1e6:.0f} + KV {kv / 1e6:.0f}, so "
        f"{allowed / 1e6:.0f} allowed: {rank / allowed:.2f}; server, engine and helpers {others / 1e6:.0f}",
        flush=True,
    )
    return {"rank_peak_bytes": rank, "weight_bytes": weights, "kv_bytes": kv, "allowed_bytes": round(allowed),
            "other_processes_peak_bytes": others}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "moewe" / "bench-1b"
    parser.add_argument("--dir", type=Path, default=cache, help="where bench-1b is or will be made (2.7 GB)")
    parser.add_argument("--variants", nargs="+", default=["bf16", "int8", "int4"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    path = checkpoint(args.dir)
    records.write("peak_memory", {name: measure(path, name, args.threads) for name in args.variants}, args.out)


if __name__ == "__main__":
    main()
