"""Five readings of the panel, each made to happen: what `moewe top` and `/metrics` show, and what mends it.

Each starts a server under a condition of its own, keeps it busy, reads what binds it, and does the same with what
docs/operations.md says to change:
- memory: decode of few requests over weights that no cache holds;
- link: rows of two ranks travel over a slow link between domains;
- hot-rank: all tokens choose experts of one rank;
- host: tiny steps with log-probabilities and penalties;
- prefill: long prompts run beside decodes.
Models are random, of a size that this machine needs. A reading that does not show what it is about, or that its change
does not mend, ends the script with exit code 1. Figures mean something on a quiet machine only; verdicts of link,
hot-rank and host hold on a busy one.

    python benchmarks/readings.py all
    python benchmarks/readings.py link host --seconds 10 --no-mend
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import records
from prometheus_client.parser import text_string_to_metric_families
from telemetry_check import Server

from moewe.native.bandwidth import llc_bytes

VOCAB = 4096
BOUNDS = ("memory", "compute", "link", "host", "imbalance", "queue", "idle")


@dataclass(frozen=True)
class Client:
    """Asks for one completion after another, `count` of them at a time.

    Attributes:
        count: how many at a time.
        prompt_tokens, max_tokens: of each request.
        fields: more of its body.
        pause_s: between two requests of one client.
    """

    count: int
    prompt_tokens: int = 32
    max_tokens: int = 64
    fields: dict[str, Any] = field(default_factory=dict)
    pause_s: float = 0.0


@dataclass(frozen=True)
class Reading:
    """One condition and what it must show.

    Attributes:
        title: for people.
        make: makes the model in a folder.
        flags: of the server.
        clients: keep it busy.
        holds: of the figures of `read`: it shows what it is about.
        mend: flags in place of `flags`, or clients in place of `clients`.
        change: what that is, in words.
        helps: of the figures before and after: it mends what docs/operations.md says.
    """

    title: str
    make: Callable[[Path], None]
    flags: tuple[str, ...]
    clients: tuple[Client, ...]
    holds: Callable[[dict[str, Any]], bool]
    mend: tuple[str, ...] | tuple[Client, ...]
    change: str
    helps: Callable[[dict[str, Any], dict[str, Any]], bool]


def faster(times: float) -> Callable[[dict[str, Any], dict[str, Any]], bool]:
    """Return what tells whether there are `times` as many tokens per second as before."""
    return lambda before, after: bool(after["tokens_per_second"] >= times * before["tokens_per_second"])


def model(folder: Path, **sizes: int) -> None:
    """Write the config of a random model; `--load-format dummy` makes its weights."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": VOCAB, "head_dim": 64,
        "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 512, "num_hidden_layers": 4,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "intermediate_size": 256,
        "norm_topk_prob": True, "tie_word_embeddings": True, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "hidden_act": "silu", "decoder_sparse_step": 1, "mlp_only_layers": [],
        "attention_bias": False, "dtype": "bfloat16", "use_sliding_window": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | sizes))


def over_the_caches(folder: Path) -> None:
    """A model whose weights are 2.5 times the last-level caches of this machine."""
    width, ffn, layers = 1024, 512, 8
    of_experts = 3 * width * ffn * 2 * layers
    experts = max(16, -(-5 * llc_bytes() // (2 * of_experts)))
    model(
        folder, hidden_size=width, moe_intermediate_size=ffn, num_hidden_layers=layers, num_experts=experts,
        num_experts_per_tok=8,
    )  # fmt: skip


def tiny(folder: Path) -> None:
    """A model whose steps are over before Python is."""
    model(folder, hidden_size=128, moe_intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
          num_key_value_heads=1)  # fmt: skip


def for_prompts(folder: Path) -> None:
    """A model whose matrices are worth multiplying: few experts, each with many rows of a prompt."""
    model(folder, hidden_size=1024, moe_intermediate_size=2048, num_hidden_layers=6, num_experts=4,
          num_attention_heads=16, num_key_value_heads=8)  # fmt: skip


def hot(folder: Path) -> None:
    """A checkpoint of 16 experts whose routers choose among the first 8 alone: those of the first of two ranks."""
    import torch
    from transformers import AutoModelForCausalLM, Glm4MoeConfig

    torch.manual_seed(0)
    config = Glm4MoeConfig(
        vocab_size=VOCAB, hidden_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, n_routed_experts=16, num_experts_per_tok=4, n_shared_experts=1, moe_intermediate_size=1024,
        intermediate_size=512, first_k_dense_replace=0, n_group=1, topk_group=1, max_position_embeddings=4096,
        initializer_range=0.05, tie_word_embeddings=True, pad_token_id=0,
    )  # fmt: skip
    made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for layer in made.model.layers:
        layer.mlp.gate.e_score_correction_bias[:8] += 10.0
    made.save_pretrained(folder)


def _bound(figures: dict[str, Any], word: str) -> bool:
    return bool(figures["verdict"] == word)


DUMMY = ("--load-format", "dummy")
LINK = "EP2DP1[domains=1+1,rate=2,delay=3000]"  # MB/s and microseconds
PROMPTS = Client(2, prompt_tokens=1500, max_tokens=2)
READINGS = {
    "memory": Reading(
        "memory-bound decode", over_the_caches, DUMMY, (Client(2),), lambda figures: _bound(figures, "memory"),
        (*DUMMY, "--quantization", "int8"), "--quantization int8", faster(1.3),
    ),
    "link": Reading(
        "bound by a link", model, (*DUMMY, "--topology", LINK, "--threads", "1"), (Client(4),),
        lambda figures: _bound(figures, "link"),
        (*DUMMY, "--topology", "EP1DP2", "--threads", "1"), "ranks that hold all experts: EP1DP2",
        lambda before, after: faster(1.2)(before, after) and after["shares"]["link"] < before["shares"]["link"] / 2,
    ),
    "hot-rank": Reading(
        "one hot rank", hot, ("--topology", "EP2DP1", "--threads", "1"), (Client(16),),
        lambda figures: figures["imbalance"] > 1.9 and figures["ranks"][1] == "imbalance" != figures["ranks"][0],
        ("--topology", "EP2DP1", "--threads", "1", "--eplb", "auto"), "--eplb auto",
        lambda before, after: after["imbalance"] < before["imbalance"] - 0.3,
    ),
    "host": Reading(
        "starved by the host", tiny, (*DUMMY, "--threads", "1"),
        (Client(16, max_tokens=512, fields={"logprobs": 5, "presence_penalty": 0.5}),),
        lambda figures: _bound(figures, "host"),
        (Client(16, max_tokens=512),), "no log-probabilities and penalties", faster(1.1),
    ),
    "prefill": Reading(
        "prefill beside decode", for_prompts, (*DUMMY, "--threads", "1", "--max-num-batched-tokens", "1024"),
        (Client(4), PROMPTS),
        lambda figures: figures["mixed"] > 0.5 and max(figures["shares"], key=figures["shares"].get) == "compute",
        (*DUMMY, "--threads", "1", "--max-num-batched-tokens", "128"), "--max-num-batched-tokens 128",
        lambda before, after: after["itl_p95_ms"] < before["itl_p95_ms"],
    ),
}  # fmt: skip


@contextmanager
def busy(url: str, clients: Sequence[Client]) -> Iterator[None]:
    """Let all clients ask while something else is done."""
    over = threading.Event()
    problems: list[Exception] = []

    def ask(client: Client, seed: int) -> None:
        dice = random.Random(seed)
        try:
            while not over.is_set():
                prompt = [dice.randrange(1, VOCAB) for _ in range(client.prompt_tokens)]
                body = {"model": "bench", "prompt": prompt, "max_tokens": client.max_tokens, "temperature": 0}
                body |= {"ignore_eos": True, **client.fields}
                request = urllib.request.Request(
                    f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
                )
                urllib.request.urlopen(request, timeout=300).close()
                over.wait(client.pause_s)
        except Exception as error:
            problems.append(error)

    each = [client for client in clients for _ in range(client.count)]
    threads = [threading.Thread(target=ask, args=pair) for pair in zip(each, range(len(each)))]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
    if problems:
        raise SystemExit(f"a request failed: {problems[0]}")


Metrics = dict[str, list[tuple[dict[str, str], float]]]


def scrape(url: str) -> Metrics:
    """Return the samples of /metrics by name."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        families = text_string_to_metric_families(response.read().decode())
    found: Metrics = {}
    for family in families:
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def total(metrics: Metrics, name: str, **labels: str) -> float:
    """Return the sum of the samples of `name` with these labels."""
    return sum(value for have, value in metrics.get(name, ()) if labels.items() <= have.items())


def quantile_ms(metrics: Metrics, share: float) -> float:
    """Return the bound under which `share` of the gaps between tokens are, milliseconds."""
    buckets = [(float(have["le"]), count) for have, count in metrics["moewe_inter_token_latency_seconds_bucket"]]
    wanted = share * max(count for _, count in buckets)
    return 1e3 * min(bound for bound, count in buckets if count >= wanted)


def read(url: str) -> dict[str, Any]:
    """Return what the panel says now: ranks by `moewe top --once --json`, shares and sums since start by /metrics."""
    command = [sys.executable, "-m", "moewe", "top", "--once", "--json", "--interval", "2", url]
    (top,) = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    metrics = scrape(url)
    shares = {by: total(metrics, "moewe_bound_share_ratio", by=by) for by in BOUNDS}
    shares = {by: share / len(metrics["moewe_ridge_point_operations_per_byte"]) for by, share in shares.items()}
    busy = total(metrics, "moewe_busy_seconds_total")
    ranks = [rank["bound"] for rank in top["ranks"]]
    return {
        "verdict": ranks[0] if len(set(ranks)) == 1 else "differs",
        "ranks": ranks,
        "shares": shares,
        "imbalance": top["imbalance"],
        "saturation": max(value for _, value in metrics["moewe_memory_saturation_ratio"]),
        "mixed": total(metrics, "moewe_busy_seconds_total", phase="mixed") / busy,
        "starved": total(metrics, "moewe_starved_seconds_total") / total(metrics, "moewe_wall_seconds_total"),
        "tokens_per_second": top["tokens_per_second"],
        "itl_p50_ms": quantile_ms(metrics, 0.5),
        "itl_p95_ms": quantile_ms(metrics, 0.95),
        "cache_resident": bool(total(metrics, "moewe_cache_resident")),
    }


def run(folder: Path, flags: Sequence[str], clients: Sequence[Client], seconds: float) -> dict[str, Any]:
    """Serve the model in `folder` under a condition and return what the panel says of it."""
    server = Server(folder, list(flags))
    try:
        with busy(server.url, clients):
            time.sleep(seconds)
            return read(server.url)
    finally:
        server.stop()


def shown(figures: dict[str, Any]) -> str:
    """Return the lines of a reading."""
    shares = ", ".join(
        f"{by} {share:.0%}"
        for by, share in sorted(figures["shares"].items(), key=lambda item: -item[1])
        if share > 0.01
    )
    notes = f"imbalance {figures['imbalance']:.2f}" if figures["imbalance"] else "no experts"
    return (
        f"  verdict of ranks: {', '.join(map(str, figures['ranks']))}; shares: {shares}\n"
        f"  {figures['tokens_per_second']:.1f} tok/s, gaps of tokens under {figures['itl_p50_ms']:.0f} (p50) and "
        f"{figures['itl_p95_ms']:.0f} ms (p95), saturation {figures['saturation']:.0%}"
        f"{' (cache)' if figures['cache_resident'] else ''}, {notes}, mixed steps {figures['mixed']:.0%} of busy time"
    )


def reproduce(name: str, seconds: float, *, mend: bool) -> tuple[bool, dict[str, Any]]:
    """Show one reading; return whether it shows what it is about and is mended, and its figures."""
    reading = READINGS[name]
    print(f"{name}: {reading.title}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        reading.make(Path(folder))
        figures = run(Path(folder), reading.flags, reading.clients, seconds)
        holds = reading.holds(figures)
        print(shown(figures), flush=True)
        if mend:
            clients = [each for each in reading.mend if isinstance(each, Client)]
            flags = [each for each in reading.mend if isinstance(each, str)]
            mended = run(Path(folder), flags or reading.flags, clients or reading.clients, seconds)
            print(f"  with {reading.change}:\n{shown(mended)}", flush=True)
            figures |= {"mended": mended, "helps": reading.helps(figures, mended)}
    print(f"  {'as it should be' if holds else 'NOT what this reading is about'}", flush=True)
    if not figures.get("helps", True):
        print("  what should mend it does NOT", flush=True)
    return holds and bool(figures.get("helps", True)), figures


def main() -> None:
    """Reproduce the readings that were named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=[*READINGS, "all"])
    parser.add_argument("--seconds", type=float, default=20.0, help="of load for each server")
    parser.add_argument("--no-mend", action="store_true", help="only the condition, not what mends it")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    names = list(READINGS) if "all" in args.names else list(dict.fromkeys(args.names))
    found = {name: reproduce(name, args.seconds, mend=not args.no_mend) for name in names}
    records.write("readings", {name: figures for name, (_, figures) in found.items()}, args.out)
    if wrong := [name for name, (holds, _) in found.items() if not holds]:
        raise SystemExit(f"not what they are about, or not mended: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
