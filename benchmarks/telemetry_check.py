"""Does a server report the bandwidth that a clock and the checkpoint say it reaches, and stay below the ceiling?

A server of bench-1b in bf16 (its weights are well over the last-level cache, else this refuses) answers one request at
a time, so that every token reads K experts of each layer, and everything else once. Measured from outside:
- bytes of a decode step: sizes of the tensors in the checkpoint's files, K experts of each layer; routers twice as
  large, since they are multiplied in fp32; keys and values from positions. Nothing of moewe is asked.
- seconds of a decode step: a client's clock around answers of N tokens and of one, their difference over N - 1.
Reported: what `/metrics` gained meanwhile in phase `decode`. Where both quotients differ by more than 3 %, or either is
above the ceiling measured at start, the exit code is 1 and each figure that does not hold is named. Run it on a quiet
machine.

    python benchmarks/telemetry_check.py --tokens 256 --repeats 5
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from math import prod
from pathlib import Path
from typing import Any

import records
from bench_1b import checkpoint
from prometheus_client.parser import text_string_to_metric_families

from moewe.native.bandwidth import llc_bytes

PROMPT_TOKENS, START_S, MOST_DIFFERENCE = 64, 300.0, 0.03
MEMORY_COMPONENTS = ("attention", "routed", "shared", "dense", "kv")
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}


def tensor_sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of each tensor of a checkpoint, from the headers of its files."""
    sizes: dict[str, int] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        sizes |= {name: prod(entry["shape"]) * ITEM_BYTES[entry["dtype"]] for name, entry in header.items()}
    return sizes


def step_bytes(folder: Path, num_tokens: int) -> float:
    """Return the mean bytes of weights and KV of a decode step of one sequence, over the steps of an answer."""
    config, sizes = json.loads((folder / "config.json").read_text()), tensor_sizes(folder)
    share = config["num_experts_per_tok"] / (config.get("num_experts") or config["num_local_experts"])
    weights = 0.0
    for name, size in sizes.items():
        is_router = name.endswith("mlp.gate.weight")
        weights += size * (share if ".experts." in name else 2 if is_router else 1)
    row = 2 * config["hidden_size"]
    if "lm_head.weight" in sizes:
        weights -= sizes["model.embed_tokens.weight"]
    a_token = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    # Step i of N - 1 writes one token and sees those of the prompt, the answer so far and itself.
    seen = sum(PROMPT_TOKENS + i for i in range(1, num_tokens)) / (num_tokens - 1)
    return weights + row + (1 + seen) * a_token


def readings(text: str) -> dict[str, float]:
    """Return the values of a page by name, with phase and component behind it where there are any; of one rank."""
    return {
        "|".join(
            [sample.name, *(sample.labels[name] for name in ("phase", "component") if name in sample.labels)]
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Server:
    """`moewe serve` on a free port."""

    def __init__(self, folder: Path, flags: list[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "moewe", "serve", str(folder), "--port", str(port), "--skip-tokenizer-init"]
        self.process = subprocess.Popen([*command, "--served-model-name", "bench", "--max-model-len", "2048", *flags])
        deadline = time.monotonic() + START_S
        while not self.is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise SystemExit("the server did not start")
            time.sleep(0.2)

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def answer_seconds(self, prompt: list[int], num_tokens: int) -> float:
        """Return how long an answer takes."""
        body = {"model": "bench", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        start = time.perf_counter()
        with urllib.request.urlopen(request, timeout=600) as response:
            answer = json.load(response)
        seconds = time.perf_counter() - start
        assert answer["usage"]["completion_tokens"] == num_tokens, answer["usage"]
        return seconds

    def metrics(self) -> dict[str, float]:
        """Return the metrics once the last counters are in: two looks that agree."""
        last: dict[str, float] = {}
        while True:
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
                seen = readings(response.read().decode())
            steady = {name: value for name, value in seen.items() if name.startswith("moewe_steps_total")}
            if steady == last and not seen["moewe_requests_running"]:
                return seen
            last = steady
            time.sleep(1.2)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def compare(server: Server, folder: Path, num_tokens: int, seed: int) -> dict[str, float]:
    """Measure one answer from outside and by the metrics."""
    dice = random.Random(seed)

    def prompt() -> list[int]:
        return [dice.randrange(1, 49152) for _ in range(PROMPT_TOKENS)]

    first = server.answer_seconds(prompt(), 1)
    before = server.metrics()
    whole = server.answer_seconds(prompt(), num_tokens)
    after = server.metrics()

    def gain(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    seconds = (whole - first) / (num_tokens - 1)
    num_bytes = step_bytes(folder, num_tokens)
    steps = gain("moewe_steps_total|decode")
    counted = sum(gain(f"moewe_memory_bytes_total|decode|{name}") for name in MEMORY_COMPONENTS)
    busy = gain("moewe_busy_seconds_total|decode")
    return {
        "steps_counted": steps,
        "step_bytes": num_bytes,
        "step_bytes_reported": counted / steps,
        "step_seconds": seconds,
        "step_seconds_reported": busy / steps,
        "bytes_per_second": num_bytes / seconds,
        "bytes_per_second_reported": counted / busy,
        "ceiling_bytes_per_second": after["moewe_memory_bandwidth_ceiling_bytes_per_second"],
        "cache_resident": after["moewe_cache_resident"],
    }


def faults(figures: dict[str, float]) -> list[str]:
    """Return what does not hold, a line each, from the figures of `compare` (medians of several)."""
    found = []
    ceiling = figures["ceiling_bytes_per_second"]
    reported, measured = figures["bytes_per_second_reported"], figures["bytes_per_second"]
    if figures["cache_resident"]:
        found.append(
            f"ceiling: {ceiling / 1e9:.2f} GB/s was measured in caches: too little memory was free, or too slow to get"
        )
    if abs(difference := reported / measured - 1) > MOST_DIFFERENCE:
        of_bytes = figures["step_bytes_reported"] / figures["step_bytes"] - 1
        of_seconds = figures["step_seconds_reported"] / figures["step_seconds"] - 1
        found.append(
            f"bandwidth: reported {reported / 1e9:.2f} GB/s, measured {measured / 1e9:.2f} ({difference:+.2%}); bytes "
            f"of a step differ by {of_bytes:+.2%}, its seconds by {of_seconds:+.2%}"
        )
    for name, value in (("reported", reported), ("measured", measured)):
        if value >= ceiling:
            found.append(f"{name} bandwidth: {value / 1e9:.2f} GB/s is above the ceiling of {ceiling / 1e9:.2f} GB/s")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "moewe" / "bench-1b"
    parser.add_argument("--dir", type=Path, default=cache, help="where bench-1b is or will be made (2.7 GB)")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    folder = checkpoint(args.dir)
    held, llc = sum(tensor_sizes(folder).values()), llc_bytes()
    touched = step_bytes(folder, args.tokens)
    print(
        f"weights {held / 2**20:.0f} MiB, {touched / 2**20:.0f} MiB of them and KV a step; caches {llc / 2**20:.0f} MiB"
    )
    if held < 2 * llc:
        raise SystemExit("the weights are not well over the last-level caches, so the figures would say nothing")
    server = Server(folder, ["--threads", str(args.threads)])
    try:
        server.answer_seconds([1] * PROMPT_TOKENS, 8)
        runs = [compare(server, folder, args.tokens, seed) for seed in range(args.repeats)]
    finally:
        server.stop()
    middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    difference = middle["bytes_per_second_reported"] / middle["bytes_per_second"] - 1
    ceiling = middle["ceiling_bytes_per_second"]
    shares = [middle[name] / ceiling for name in ("bytes_per_second_reported", "bytes_per_second")]
    exact = middle["step_bytes_reported"] / middle["step_bytes"] - 1
    print(f"bytes a step: reported {middle['step_bytes_reported']:.0f}, from the files {touched:.0f} ({exact:+.4%})")
    milliseconds = [1e3 * middle[name] for name in ("step_seconds_reported", "step_seconds")]
    print("time of a step: reported {:.2f} ms, by the clock {:.2f} ms".format(*milliseconds))
    print(
        f"bandwidth: reported {shares[0]:.1%} of the ceiling of {ceiling / 1e9:.2f} GB/s, measured {shares[1]:.1%}: "
        f"{difference:+.2%}"
    )
    wrong = faults(middle)
    results: dict[str, Any] = {"runs": runs, "difference": difference, "of_ceiling": shares, "llc_bytes": llc}
    results |= {"weight_bytes": held, "tokens": args.tokens, "threads": args.threads, "faults": wrong}
    records.write("telemetry_check", results, args.out)
    if wrong:
        raise SystemExit("\n".join(["the report does not hold:", *wrong]))


if __name__ == "__main__":
    main()
