"""The bitwise class of native kernels: tokens and logits of a request are the same to the last bit, whatever else runs.

Alone or in a batch, in chunks of any size, after preemption, at EP1, EP2 and EP4, with one thread or two, greedy or
seeded, with KV in every format, over heads of K and V and over latents (decision 017 says what is outside).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moewe import LLM
from moewe.runtime.params import SamplingParams
from tests.support.fixtures import checkpoint, random_prompt
from tests.support.harness import Outcome, generate, greedy
from tests.support.native import needs_native
from tests.support.quantised import fp8_checkpoint, mxfp4_checkpoint
from tests.support.setups import Setup

pytestmark = needs_native

# Heads with a norm and experts in all layers; sinks, windows and biases; shared experts and a dense layer; parallel
# dense weights; norms behind the blocks; latents.
FAMILIES = ["T-QW3", "T-GLM-demo", "T-OLM", "T-DS3"]
SLOW_FAMILIES = [
    "T-GOS",
    "T-MIX",
    "T-QW2",
    "T-GRA",
    "T-FLX",
    "T-LL4",
    "T-ERN",
    "T-MM2",
    "T-PHI",
    "T-DS2",
    "T-DS2-groups",
    "T-GLL",
]
# Checkpoints that are quantised as stored: experts of four bits; heads or latents and experts of eight, in blocks.
STORED = {
    "T-GOS mxfp4": cache(lambda: mxfp4_checkpoint("T-GOS")[0]),
    "T-MM2 fp8": cache(lambda: fp8_checkpoint("T-MM2", (128, 128))[0]),
    "T-DS3 fp8": cache(lambda: fp8_checkpoint("T-DS3", (24, 40))[0]),
}
CASES = [
    *(pytest.param(name, "auto", marks=[pytest.mark.slow] * (name in ("T-GLM-demo", "T-OLM"))) for name in FAMILIES),
    ("T-GOS", "fp8"),
    *(pytest.param(name, "auto", marks=[pytest.mark.slow] * (name == "T-DS3 fp8")) for name in STORED),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in zip(FAMILIES, ["fp8", "int8"] * 2)),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in zip(SLOW_FAMILIES, ["auto", "fp8", "int8"] * 4)),
    pytest.param("T-PHI", "int8", marks=pytest.mark.slow),  # its router once gave other bits in company
    *(pytest.param(f"T-QW3 {kind}", "auto", marks=pytest.mark.slow) for kind in ("int8", "int4")),
    *(pytest.param(f"T-DS3 {kind}", "int8", marks=pytest.mark.slow) for kind in ("int8", "int4")),
]
PROMPTS = [random_prompt(length, seed=length) for length in (37, 5, 20, 1, 64)]
SEEDED = SamplingParams(max_tokens=10, temperature=0.9, top_p=0.95, seed=7, ignore_eos=True)
PARAMS = [greedy(10, logprobs=2), SEEDED, greedy(10), greedy(10), SEEDED]


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run(name: str, chosen: list[int], num_threads: int = 1, **setup: object) -> list[Outcome]:
    """Run prompts of a family, of a stored checkpoint, or, as `FAMILY int8`, of one that is quantised at load."""
    if name not in STORED and " " in name:
        name, setup["quantization"] = name.split()
    with threads(num_threads):
        return generate(
            STORED[name]() if name in STORED else checkpoint(name, dtype="bfloat16"),
            [PROMPTS[i] for i in chosen],
            setup=Setup(dtype="bfloat16", **setup),  # type: ignore[arg-type]
            params=[PARAMS[i] for i in chosen],
        ).outcomes


def assert_bitwise(outcome: Outcome, expected: Outcome) -> None:
    assert outcome.tokens == expected.tokens
    assert outcome.logprobs == expected.logprobs or [(own.token_ids, own.logprobs) for own in outcome.logprobs] == [
        (own.token_ids, own.logprobs) for own in expected.logprobs
    ]
    assert torch.equal(outcome.logits_of_all(), expected.logits_of_all())


@cache
def alone(name: str, kv_cache_dtype: str) -> list[Outcome]:
    """Each request by itself at EP1, its prompt in one piece, on one thread; computed once."""
    return [run(name, [i], kv_cache_dtype=kv_cache_dtype)[0] for i in range(len(PROMPTS))]


WAYS = {
    "together": {},
    "chunks of 7": {"max_chunk_tokens": 7},
    "one row at a time": {"max_chunk_tokens": 1},
    "two threads": {"num_threads": 2},
    "EP2": {"topology": "EP2DP1"},
    "EP4": {"topology": "EP4DP1", "max_chunk_tokens": 16},
    "EP2 with replicas": {"topology": "EP2DP1[red=3]"},
    "EP4 with replicas": {"topology": "EP4DP1[red=5]", "max_chunk_tokens": 16},
    "little memory": {"num_blocks": 22, "block_size": 4, "max_chunk_tokens": 64},
    "small blocks": {"block_size": 4, "num_blocks": 400},
}


@pytest.mark.parametrize(("name", "kv_cache_dtype"), CASES)
def test_every_way_to_run_gives_the_same_bits(name: str, kv_cache_dtype: str) -> None:
    expected = alone(name, kv_cache_dtype)
    for way, setup in WAYS.items():
        outcomes = run(name, list(range(len(PROMPTS))), kv_cache_dtype=kv_cache_dtype, **setup)  # type: ignore[arg-type]
        assert way != "little memory" or any(outcome.num_preemptions for outcome in outcomes)
        for i, outcome in enumerate(outcomes):
            try:
                assert_bitwise(outcome, expected[i])
            except AssertionError as error:
                raise AssertionError(f"{name}, request {i}, {way}") from error


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    chosen=st.lists(st.integers(0, len(PROMPTS) - 1), min_size=1, max_size=5),
    ranks=st.sampled_from([1, 2, 4]),
    chunk=st.integers(1, 40),
    block_size=st.sampled_from([4, 16, 32]),
    is_little=st.booleans(),
    num_threads=st.sampled_from([1, 2]),
    name_and_kv=st.sampled_from(
        [("T-QW3", "auto"), ("T-QW3", "fp8"), ("T-QW3", "int8"), ("T-QW3 int8", "auto"), ("T-QW3 int4", "int8")]
    ),
)
def test_any_company_gives_the_same_bits(
    chosen: list[int],
    ranks: int,
    chunk: int,
    block_size: int,
    is_little: bool,
    num_threads: int,
    name_and_kv: tuple[str, str],
) -> None:
    name, kv_cache_dtype = name_and_kv
    expected = alone(name, kv_cache_dtype)
    setup: dict[str, Any] = {"topology": f"EP{ranks}DP1", "max_chunk_tokens": chunk, "block_size": block_size}
    if is_little:  # some requests are put back and begin again
        setup |= WAYS["little memory"]
    outcomes = run(name, chosen, num_threads, kv_cache_dtype=kv_cache_dtype, **setup)
    for i, outcome in zip(chosen, outcomes, strict=True):
        assert_bitwise(outcome, expected[i])


@pytest.mark.slow
@pytest.mark.spawn
@pytest.mark.parametrize(
    ("name", "topology", "quantization", "kv_cache_dtype"),
    [
        ("T-QW3", "EP4DP1", None, "auto"),
        ("T-QW3", "EP2DP1", "int4", "int8"),
        ("T-QW3", "EP2DP1", None, "fp8"),
        ("T-DS3", "EP4DP1", "int8", "auto"),
    ],
)
def test_processes_over_shared_memory_give_the_bits_of_one_rank(
    name: str, topology: str, quantization: str | None, kv_cache_dtype: str
) -> None:
    """What is served: ranks of one host as processes, all layers and their exchange in one native call."""
    alone = served(name, "EP1DP1", quantization, kv_cache_dtype, ranks="threads")
    assert served(name, topology, quantization, kv_cache_dtype) == alone


def served(
    name: str, topology: str, quantization: str | None, kv_cache_dtype: str, **more: str
) -> list[tuple[list[int], list[dict[int, float]]]]:
    """Return tokens of all requests and the log-probabilities of those that asked."""
    options = {"skip_tokenizer_init": True, "threads": 1, "num_blocks": 64, "kv_cache_dtype": kv_cache_dtype, **more}
    if quantization is not None:
        options["quantization"] = quantization
    with LLM(str(checkpoint(name, dtype="bfloat16")), topology=topology, **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS)
    chosen = [output.outputs[0] for output in outputs]
    return [
        (list(one.token_ids), [{i: value.logprob for i, value in place.items()} for place in one.logprobs or []])
        for one in chosen
    ]
