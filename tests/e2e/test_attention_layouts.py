"""Attention whose heads are divided over ranks (`atp` > 1): the answers of one rank, whatever happens around a request.

Its own class of bits (decision 023): another order of sums than `atp=1`, so fp32 answers are compared with a tolerance;
but the same from run to run, and in bf16 with native kernels also alone or in company.
"""

from __future__ import annotations

import pytest
import torch

from moewe.models.config import ConfigError
from moewe.runtime.params import SamplingParams
from moewe.runtime.resolve import resolve
from moewe.topologies import TopologyError
from tests.runtime.test_generation import config
from tests.support.comparison import compare_runs
from tests.support.fixtures import MOE_FIXTURES, checkpoint, random_prompt
from tests.support.harness import Group, Outcome, generate, greedy
from tests.support.native import needs_native
from tests.support.numerics import LOGPROBS
from tests.support.setups import Setup

HALVES, TWICE, FOURTHS = "EP2DP1[atp=2]", "EP4DP1[adp=2,atp=2]", "EP4DP1[atp=4]"
# Norms over all heads, latents, sinks and windows, runs of positions, biases on what heads give.
ALWAYS = {("T-QW3", HALVES), ("T-DS3", TWICE), ("T-GOS", HALVES), ("T-OLM", TWICE), ("T-LL4", HALVES), ("T-GLM", TWICE)}
SPREAD = [  # each family over two ranks or two times two, turn by turn, and over four
    pytest.param(name, topology, marks=() if (name, topology) in ALWAYS else pytest.mark.slow)
    for turn, name in enumerate(MOE_FIXTURES)
    for topology in (HALVES, TWICE, FOURTHS)
    if (name, topology) in ALWAYS or topology in ((HALVES, TWICE)[turn % 2], FOURTHS)
]
LENGTHS = (33, 1, 17, 50, 5, 2)


@pytest.mark.parametrize(("name", "topology"), SPREAD)
def test_divided_heads_answer_as_one_rank_does(name: str, topology: str) -> None:
    path = checkpoint(name)
    prompts = [random_prompt(length, seed=length) for length in LENGTHS]
    alone = generate(path, prompts, params=greedy(6))
    spread = generate(path, prompts, setup=Setup(topology=topology, max_chunk_tokens=16), params=greedy(6))
    compare_runs(spread.outcomes, alone.outcomes)
    for group in spread.groups:  # the harness checks every step: experts see each row once, not once a rank
        assert all(worker.counters.unowned_ids == 0 for worker in group.workers)
        assert all(outcome.drift == 0 for outcome in spread.outcomes), "ranks of a replica disagree"


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_ranks_share_kv_heads_where_there_are_few(kv_heads: int) -> None:
    path = checkpoint("T-QW3", num_key_value_heads=kv_heads)
    prompts = [random_prompt(length, seed=length) for length in LENGTHS]
    alone = generate(path, prompts, params=greedy(4))
    with Group(path, Setup(topology=FOURTHS)) as group:
        outcomes = [group.submit(str(i), prompt, greedy(4)) for i, prompt in enumerate(prompts)]
        group.run()
        stored = [worker.storage.num_bytes for worker in group.workers]
    compare_runs(outcomes, alone.outcomes)
    assert stored == [alone.groups[0].workers[0].storage.num_bytes // min(4, kv_heads)] * 4


@pytest.mark.parametrize("name", ["T-QW3", *(pytest.param(n, marks=pytest.mark.slow) for n in ("T-GOS", "T-DS2"))])
def test_preempted_requests_go_on_with_divided_heads(name: str) -> None:
    path = checkpoint(name)
    prompts = [random_prompt(20, seed=i) for i in range(6)]
    alone = generate(path, prompts, params=greedy(16))
    setup = Setup(topology=TWICE, num_blocks=26, block_size=2, max_chunk_tokens=7)
    run = generate(path, prompts, setup=setup, params=greedy(16))
    assert run.num_preemptions > 0
    compare_runs(run.outcomes, alone.outcomes)


def test_replicas_and_ranks_without_rows_keep_step() -> None:
    """One request decodes: one of two replicas has a row, and of that one's ranks only the first has it between."""
    path, prompt = checkpoint("T-QW3"), random_prompt(12)
    with Group(path, Setup(topology=TWICE)) as group:
        outcome = group.submit("alone", prompt, greedy(24))
        group.run()
        rows = [step.rows for step in group.steps]
        tokens = [int(worker.counters.tokens.sum()) for worker in group.workers]
    assert rows[0] == (6, 6, 0, 0) and set(rows[1:]) == {(1, 0, 0, 0)}
    assert sum(tokens) == 12 + 23, "a row is counted by one rank"
    compare_runs([outcome], generate(path, [prompt], params=greedy(24)).outcomes)


def test_sampling_and_log_probabilities_come_from_the_first_rank() -> None:
    path = checkpoint("T-QW3")
    prompts = [random_prompt(length, seed=length) for length in (20, 7, 40, 3)]
    params = [
        SamplingParams(max_tokens=12, temperature=0.8, seed=i, ignore_eos=True, logprobs=3, prompt_logprobs=2, top_k=5,
                       presence_penalty=0.5, stop_token_ids=(3, 9), min_tokens=4)
        for i in range(len(prompts))
    ]  # fmt: skip
    alone = generate(path, prompts, params=params).outcomes
    spread = generate(path, prompts, setup=Setup(topology=TWICE, max_chunk_tokens=7), params=params).outcomes
    for own, other in zip(spread, alone, strict=True):
        assert (own.tokens, own.finish_reason) == (other.tokens, other.finish_reason)
        assert [entry.token_ids for entry in own.logprobs] == [entry.token_ids for entry in other.logprobs]
        for entry, reference in zip(own.logprobs, other.logprobs, strict=True):
            assert entry.logprobs == pytest.approx(reference.logprobs, abs=LOGPROBS)
        ids = [b"".join(piece.token_ids for piece in each.prompt_logprobs) for each in (own, other)]
        assert ids[0] == ids[1] != b""


@pytest.mark.parametrize("name", ["T-QW3", pytest.param("T-DS3", marks=pytest.mark.slow)])
def test_two_runs_give_the_same_bits(name: str) -> None:
    path, prompts = checkpoint(name), [random_prompt(length, seed=length) for length in LENGTHS]
    first, second = (generate(path, prompts, setup=Setup(topology=TWICE), params=greedy(6)).outcomes for _ in range(2))
    assert_bitwise(first, second)


@needs_native
@pytest.mark.parametrize(
    ("name", "kv_cache_dtype", "quantization"),
    [
        ("T-QW3", "auto", None),
        ("T-GLM-demo", "fp8", None),
        pytest.param("T-GOS", "int8", None, marks=pytest.mark.slow),
        pytest.param("T-QW3", "auto", "int8", marks=pytest.mark.slow),
        ("T-QW3", "auto", "int4"),
        pytest.param("T-OLM", "auto", None, marks=pytest.mark.slow),
        pytest.param("T-GLM", "fp8", "int8", marks=pytest.mark.slow),
    ],
)
def test_native_kernels_give_the_same_bits_alone_and_in_company(
    name: str, kv_cache_dtype: str, quantization: str | None
) -> None:
    path = checkpoint(name, dtype="bfloat16")
    prompts = [random_prompt(length, seed=length) for length in (37, 5, 1, 20)]

    def run(topology: str, chosen: list[int], **changes: object) -> list[Outcome]:
        setup = Setup(topology=topology, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype, quantization=quantization,
                      **changes)  # type: ignore[arg-type]  # fmt: skip
        return generate(path, [prompts[i] for i in chosen], setup=setup, params=greedy(6)).outcomes

    alone = [run(HALVES, [i])[0] for i in range(len(prompts))]
    assert_bitwise(run(HALVES, [0, 1, 2, 3], max_chunk_tokens=7), alone)
    assert_bitwise(run(TWICE, [0, 1, 2, 3]), alone)
    one_rank = run("EP1DP1", [0, 1, 2, 3])
    differences = [
        float((own.logits[i] - other.logits[i]).abs().max() / other.logits[i].abs().max())
        for own, other in zip(alone, one_rank, strict=True)
        for i in range(len(own.prompt))
    ]
    # Roundings flip an expert here and there, so the middle of the rows is held to the format. Activations of what is
    # quantised are rounded by row, and a share of the heads has its own largest one.
    assert sorted(differences)[len(differences) // 2] < (0.05 if quantization is None else 0.2)


def assert_bitwise(ours: list[Outcome], theirs: list[Outcome]) -> None:
    for own, other in zip(ours, theirs, strict=True):
        assert own.tokens == other.tokens
        assert torch.equal(own.logits_of_all(), other.logits_of_all())


def test_memory_is_counted_as_it_is_held() -> None:
    """The budget's attention and KV of a rank are those that the ranks hold; what goes over links is counted."""
    path = checkpoint("T-QW3")
    resolved = resolve(config(path, TWICE))
    lines = {line.name: line.num_bytes for line in resolved.budget.lines}
    with Group(path, Setup(topology=TWICE, num_blocks=64, max_model_len=512)) as group:
        group.submit("a", random_prompt(20), greedy(4))
        group.run()
        worker = group.workers[0]
        sent = [int(worker.counters.bytes_moved[:, -1].sum()) for worker in group.workers]
        assert lines["KV cache"] == worker.storage.num_bytes
        assert lines["attention weights"] == sum(
            size for kind, size in group.loaded[0].weight_kinds.items() if kind.startswith("attention/")
        )
    assert min(sent[:2]) > 0, "rows of the attention replica crossed a link"
    assert resolved.most_requests == 2 * 8 + resolved.config.schedule.max_queued_requests


@pytest.mark.parametrize(("topology", "words"), [("EP8DP1[atp=8]", ["atp=8", "num_attention_heads=4", "adp=2,atp=4"])])
def test_a_layout_that_does_not_divide_the_heads_is_refused_at_once(topology: str, words: list[str]) -> None:
    with pytest.raises((TopologyError, ConfigError)) as caught:
        resolve(config(checkpoint("T-QW3"), topology))
    assert all(word in str(caught.value) for word in words)
