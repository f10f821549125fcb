"""`LLM` and `moewe generate` on real rank processes, with a checkpoint that says what a test scripts."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from moewe import LLM, SamplingParams, StructuredSpec
from tests.support.chain import chain

SMALL = {"kv_cache_memory_bytes": 1 << 22, "threads": 1}


@pytest.mark.spawn
def test_llm_on_two_ranks_says_the_script_and_leaves_no_process() -> None:
    made = chain(["The ", "gull ", "flies ", "far."])
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with LLM(str(made.path), topology="EP2DP1", max_model_len=256, **SMALL) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=32, logprobs=2)
        for output in llm.generate(["x", "a longer prompt", {"prompt_token_ids": [5, 6, 7]}], greedy):
            (completion,) = output.outputs
            assert (completion.text, completion.token_ids) == (made.text, made.token_ids)
            assert completion.finish_reason == "stop" and completion.logprobs is not None
            for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
                assert entry[token].rank == 1 and entry[token].logprob > -0.01 and len(entry) == 2
        assert list(llm.stream("x", SamplingParams(temperature=0, stop=("flies",)))) == ["The ", "gull "]
        structured = StructuredSpec(kind="choice", text='["far", "near"]')
        bound = SamplingParams(temperature=0, max_tokens=32, structured=structured)
        (completion,) = llm.generate("x", bound)[0].outputs
        assert completion.text in ("far", "near") and completion.finish_reason == "stop"
        assert llm.generate("x", SamplingParams(temperature=0, max_tokens=2))[0].outputs[0].finish_reason == "length"
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


@pytest.mark.spawn
@pytest.mark.slow
def test_generate_prints_the_text() -> None:
    made = chain(["Möwe", " flies."])
    words = ["generate", str(made.path), "x", "--kv-cache-memory-bytes", "4MiB", "--threads", "1", "--dtype", "float32"]
    done = subprocess.run(
        [sys.executable, "-m", "moewe", *words], capture_output=True, text=True, check=False, timeout=240
    )
    assert (done.returncode, done.stdout) == (0, "Möwe flies.\n"), done.stderr
