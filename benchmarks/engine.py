"""How fast does the engine decode and prefill bench-1b on this CPU, by format of the weights and by topology?

All variants are loaded at once and measured in turns, so that the machine's moods fall on all alike; ratios are to the
first. pp512: one prompt of 512 tokens; 2pp512: two such prompts together. dN: decode of N requests together, 128-token
prompts, 64 tokens each; rate = N * (new tokens - 1) / (time for all new tokens - time for the first one). Checked once
before anything is timed: a request decoded alone and in a batch of 16 gives the same tokens.

    python benchmarks/engine.py --variants bf16 int8 int4 EP2DP1/bf16 --repeats 3
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import records
from bench_1b import NEW_TOKENS, PREFILL_TOKENS, PROMPT_TOKENS, Generate, checkpoint, prompts, seconds


def engine(path: Path, variant: str) -> tuple[Generate, Callable[[], None]]:
    """Return the generate function of a variant, `[TOPOLOGY/]FORMAT`, and its close."""
    from moewe import LLM, SamplingParams

    topology, _, weights = variant.rpartition("/")
    options: dict[str, Any] = {} if weights == "bf16" else {"quantization": weights}
    llm = LLM(
        str(path), topology=topology or "EP1DP1", skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=64,
        kv_cache_memory_bytes=1 << 30, **options,
    )  # fmt: skip

    def generate(batch: list[list[int]], new_tokens: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in batch], params)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate, llm.close


def check(variant: str, generate: Generate) -> None:
    """End the script unless company changes no token."""
    batch = prompts(16, PROMPT_TOKENS)
    if generate(batch, 8)[0] != generate(batch[:1], 8)[0]:
        raise SystemExit(f"{variant}: a request has other tokens alone than in a batch")


def decode_rate(generate: Generate, number: int) -> float:
    """Return tokens per second of `number` requests that decode together."""
    batch = prompts(number, PROMPT_TOKENS)
    first = seconds(generate, batch, 1)
    return number * (NEW_TOKENS - 1) / (seconds(generate, batch, NEW_TOKENS) - first)


def prefill_rate(generate: Generate, number: int) -> float:
    """Return tokens per second of `number` prompts that come together, after an untimed one: it stood still so far."""
    generate(prompts(1, PREFILL_TOKENS), 1)
    return number * PREFILL_TOKENS / seconds(generate, prompts(number, PREFILL_TOKENS), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "moewe" / "bench-1b"
    parser.add_argument("--dir", type=Path, default=cache, help="where bench-1b is or will be made (2.7 GB)")
    parser.add_argument("--variants", nargs="+", default=["bf16", "int8", "int4"])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 2], help="prompts that come together")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    path = checkpoint(args.dir)
    engines = {variant: engine(path, variant) for variant in args.variants}
    for variant, (generate, _) in engines.items():
        check(variant, generate)
    rates: dict[str, dict[str, list[float]]] = {}
    for _ in range(args.repeats):
        for number in args.prompts:
            name = f"pp{PREFILL_TOKENS}" if number == 1 else f"{number}pp{PREFILL_TOKENS}"
            for variant, (generate, _) in engines.items():
                rates.setdefault(name, {}).setdefault(variant, []).append(prefill_rate(generate, number))
        for number in args.requests:
            for variant, (generate, _) in engines.items():
                rates.setdefault(f"d{number}", {}).setdefault(variant, []).append(decode_rate(generate, number))
    results: dict[str, Any] = {}
    for name, sides in rates.items():
        results[name] = {variant: records.summary(values) for variant, values in sides.items()}
        first = results[name][args.variants[0]]["median"]
        shown = [
            f"{variant} {found['median']:7.1f} [{found['min']:.1f}, {found['max']:.1f}] x{found['median'] / first:.2f}"
            for variant, found in results[name].items()
        ]
        print(f"{name:>6} tok/s: {'   '.join(shown)}", flush=True)
    for _, close in engines.values():
        close()
    records.write("engine", results, args.out)


if __name__ == "__main__":
    main()
