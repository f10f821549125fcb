"""How fast does moewe decode and prefill bench-1b on this CPU, beside transformers in the same run?

bench-1b is a Qwen3-MoE of random bf16 weights in the shape of granite-3.1-1b-a400m (1.33 B parameters, 0.43 B active).
Both sides run in one process, alternately, with the same prompts. Decode rate = N * (new tokens - 1) / (time for all
new tokens - time for the first one). The output is compared once before anything is timed.

    python benchmarks/bench_1b.py --requests 1 4 16 --repeats 3
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import records

PROMPT_TOKENS = 128
NEW_TOKENS = 64
PREFILL_TOKENS = 512


def checkpoint(folder: Path) -> Path:
    """Make bench-1b with transformers once; return its folder."""
    if (folder / "config.json").exists() and list(folder.glob("*.safetensors")):
        return folder
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=49152, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=8,
        head_dim=64, num_experts=32, num_experts_per_tok=8, moe_intermediate_size=512, intermediate_size=512,
        norm_topk_prob=True, tie_word_embeddings=True, initializer_range=0.05, max_position_embeddings=4096,
    )  # fmt: skip
    print("making bench-1b ...", flush=True)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def prompts(number: int, length: int) -> list[list[int]]:
    """Return `number` random prompts of `length` tokens, the same for both sides."""
    return np.random.default_rng(number).integers(1, 49152, (number, length)).tolist()


Generate = Callable[[list[list[int]], int], list[list[int]]]


def ours(path: Path) -> tuple[Generate, Callable[[], None]]:
    """Return moewe's generate function and its close."""
    from moewe import LLM, SamplingParams

    llm = LLM(str(path), skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=64)

    def generate(batch: list[list[int]], new_tokens: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in batch], params)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate, llm.close


def peer(path: Path) -> Generate:
    """Return transformers' generate function (sdpa attention, grouped_mm experts)."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, attn_implementation="sdpa", experts_implementation="grouped_mm"
    ).eval()

    def generate(batch: list[list[int]], new_tokens: int) -> list[list[int]]:
        ids = torch.tensor(batch)
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, min_new_tokens=new_tokens,
                do_sample=False, pad_token_id=0,
            )  # fmt: skip
        return out[:, ids.shape[1] :].tolist()

    return generate


def seconds(function: Generate, batch: list[list[int]], new_tokens: int) -> float:
    """Return the wall time of one call."""
    start = time.perf_counter()
    function(batch, new_tokens)
    return time.perf_counter() - start


def agreement(first: Generate, second: Generate) -> float:
    """Return the share of prompts whose first greedy token is the same on both sides (bf16 rounds differently)."""
    batch = prompts(16, PROMPT_TOKENS)
    pairs = zip(first(batch, 2), second(batch, 2), strict=True)
    return sum(a[0] == b[0] for a, b in pairs) / len(batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "moewe" / "bench-1b"
    parser.add_argument("--dir", type=Path, default=cache, help="where bench-1b is or will be made (2.7 GB)")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    path = checkpoint(args.dir)
    mine, close = ours(path)
    theirs = peer(path)
    results: dict[str, Any] = {"first_token_agreement": agreement(mine, theirs)}
    print(f"first greedy token agrees for {results['first_token_agreement']:.0%} of 16 prompts (bf16)")
    if results["first_token_agreement"] < 0.75:
        raise SystemExit("the outputs differ too much to compare speeds")

    def compare(name: str, measure: Callable[[Generate], float]) -> None:
        rates: dict[str, list[float]] = {"moewe": [], "transformers": []}
        for _ in range(args.repeats):
            rates["moewe"].append(measure(mine))
            rates["transformers"].append(measure(theirs))
        record = {side: records.summary(values) for side, values in rates.items()}
        ratio = record["moewe"]["median"] / record["transformers"]["median"]
        results[name] = {"tokens_per_second": record, "ratio": ratio}
        print(
            f"{name:>6}: moewe {record['moewe']['median']:7.1f} tok/s   "
            f"transformers {record['transformers']['median']:7.1f} tok/s   ratio {ratio:.2f}",
            flush=True,
        )

    for number in args.requests:
        batch = prompts(number, PROMPT_TOKENS)

        def decode_rate(generate: Generate, batch: list[list[int]] = batch) -> float:
            first = seconds(generate, batch, 1)
            every = seconds(generate, batch, NEW_TOKENS)
            return len(batch) * (NEW_TOKENS - 1) / (every - first)

        compare(f"d{number}", decode_rate)
    compare("pp512", lambda generate: PREFILL_TOKENS / seconds(generate, prompts(1, PREFILL_TOKENS), 1))
    close()
    records.write("bench_1b", results, args.out)


if __name__ == "__main__":
    main()
