"""The decoder alone against transformers in fp32, in chunks, batches and topologies, and the bytes that it counts."""

from __future__ import annotations

import pytest
import torch

from moewe.models.families import load_config
from moewe.models.weights import ModelWeights
from moewe.telemetry import COMPONENTS, PHASES, RankCounters
from tests.support.comparison import compare_with_reference
from tests.support.decoding import decode
from tests.support.fixtures import DENSE_FIXTURES, MOE_FIXTURES, checkpoint, random_prompt, reference_logits
from tests.support.harness import generate, greedy
from tests.support.matrix import UNLIKE
from tests.support.numerics import LOGITS_AGAINST_REFERENCE, LOGITS_BETWEEN_RUNS, assert_within

LENGTHS = (33, 1, 50, 17, 4)


def sequences() -> list[list[int]]:
    return [random_prompt(length, seed=length) for length in LENGTHS]


def assert_near_logits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Assert that two of our runs agree, relative to the largest logit of each row."""
    scale = theirs.abs().amax(-1, keepdim=True).clamp(min=1)
    assert_within(ours / scale, theirs / scale, LOGITS_BETWEEN_RUNS)


def counted(counters: RankCounters, component: str) -> int:
    return int(counters.bytes_moved[PHASES.index("mixed"), COMPONENTS.index(component)])


# tests/e2e/test_families.py has every family in all chunks, in the whole runtime.
@pytest.mark.parametrize(
    ("name", "chunk"),
    [
        *((name, 7) for name in UNLIKE),
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in MOE_FIXTURES + DENSE_FIXTURES),
    ],
)
def test_logits_equal_transformers(name: str, chunk: int) -> None:
    path = checkpoint(name)
    alone = decode(path, [random_prompt(33)], chunk=chunk)
    assert_within(alone.logits[0], reference_logits(path, random_prompt(33)), LOGITS_AGAINST_REFERENCE)
    together = decode(path, sequences(), chunk=chunk)
    for sequence, logits in zip(sequences(), together.logits):
        assert_within(logits, reference_logits(path, sequence), LOGITS_AGAINST_REFERENCE)


# One of each kind of routing and experts: tests/e2e/test_families.py has all families at all topologies.
@pytest.mark.parametrize("name", ["T-MIX", "T-QW2", "T-DS2-groups", "T-DS3", "T-GOS", "T-PHI", "T-LL4", "T-FLX"])
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_topology_equals_transformers_and_one_rank(name: str, num_ranks: int) -> None:  # P-EP-02, P-EP-03
    path = checkpoint(name)
    one = decode(path, sequences(), chunk=7)
    many = decode(path, sequences(), chunk=7, num_ranks=num_ranks)
    for sequence, ours, theirs in zip(sequences(), many.logits, one.logits):
        assert_within(ours, reference_logits(path, sequence), LOGITS_AGAINST_REFERENCE)
        assert_near_logits(ours, theirs)
    config = load_config(path)
    assert config.moe is not None
    routed = sum(LENGTHS) * config.moe.routing.top_k
    per_layer = sum(c.expert_tokens.sum(1) for c in many.counters)
    assert per_layer.tolist() == [routed] * len(config.moe_layers)
    assert all(c.unowned_ids == 0 for c in many.counters)


def test_ten_experts_over_four_ranks() -> None:  # P-LOAD-24
    path = checkpoint("T-QW3", num_experts=10)
    for sequence, logits in zip(sequences(), decode(path, sequences(), num_ranks=4).logits):
        assert_within(logits, reference_logits(path, sequence), LOGITS_AGAINST_REFERENCE)


def test_ranks_without_rows_keep_step() -> None:
    path = checkpoint("T-QW2")
    alone = decode(path, [random_prompt(33)], num_ranks=4, chunk=7)
    assert_within(alone.logits[0], reference_logits(path, random_prompt(33)), LOGITS_AGAINST_REFERENCE)
    for rank, counters in enumerate(alone.counters):
        assert counters.steps.sum() == alone.num_steps
        idle = rank > 0
        for component in ("attention", "shared", "dense", "kv", "activations"):
            assert (counted(counters, component) == 0) == idle, component
        assert counted(counters, "routed") > 0


def force_experts(*experts: int) -> object:
    """Make the routers of all layers choose `experts` for every token, best first."""

    def change(weights: ModelWeights) -> None:
        for layer in weights.layers:
            assert layer.moe is not None and layer.moe.selection_bias is not None
            layer.moe.selection_bias.zero_()
            for i, expert in enumerate(experts):
                layer.moe.selection_bias[expert] = 100.0 - 10 * i

    return change


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_experts_and_ranks_that_get_nothing_stay_silent(num_ranks: int) -> None:  # P-EP-04
    path = checkpoint("T-GLM-demo", n_routed_experts=8, num_experts_per_tok=2)
    change = force_experts(0, 1)
    expected = decode(path, sequences(), change=change)
    poison = [torch.full((n,), torch.nan) for n in (64, 1024, 4096, 16384, 65536) for _ in range(16)]
    del poison
    actual = decode(path, sequences(), num_ranks=num_ranks, change=change)
    for ours, theirs in zip(actual.logits, expected.logits):
        assert_near_logits(ours, theirs)
    hits = [c.expert_tokens for c in actual.counters]
    assert sum(h.sum() for h in hits) == hits[0][:, :2].sum() == 2 * 2 * sum(LENGTHS)


def test_an_expert_that_gets_everything_drops_nothing() -> None:  # P-EP-05
    path = checkpoint("T-GLM-demo", n_routed_experts=8, num_experts_per_tok=2)
    change = force_experts(7)
    prompts = [random_prompt(700, seed=i) for i in range(4)]
    expected = decode(path, prompts, change=change)
    actual = decode(path, prompts, num_ranks=4, change=change)
    for ours, theirs in zip(actual.logits, expected.logits):
        assert_near_logits(ours, theirs)
    assert actual.counters[3].expert_tokens[:, 1].tolist() == [2800, 2800]
    assert sum(c.expert_tokens.sum() for c in actual.counters) == 2 * 2 * 2800


@pytest.mark.parametrize("name", ["T-QW2", "T-GLM-demo", "T-LLA"])
def test_weight_bytes_are_those_of_the_tensors_held(name: str) -> None:
    """One step of one row reads every tensor once, K experts of each layer, and one row of the embedding."""
    path = checkpoint(name)
    first = decode(path, [random_prompt(1)])
    assert first.num_steps == 1
    counters, weights, config = first.counters[0], first.weights[0], load_config(path)
    embedding_row = weights.embedding[0].numel() * weights.embedding.element_size()
    routed = counted(counters, "routed")
    if config.moe is not None:
        experts = weights.layers[0].moe.experts
        assert routed == len(config.moe_layers) * config.moe.routing.top_k * experts.bytes_per_slot
    held = weights.num_bytes - sum(
        t.numel() * t.element_size()
        for layer in weights.layers
        if layer.moe
        for t in vars(layer.moe.experts).values()
        if isinstance(t, torch.Tensor)
    )
    if weights.head is not weights.embedding:
        held -= weights.embedding.numel() * weights.embedding.element_size()
    weight_bytes = sum(counted(counters, c) for c in ("attention", "shared", "dense"))
    assert weight_bytes == held + embedding_row
    token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    assert counted(counters, "kv") == 2 * token  # one token written, one read
    assert counted(counters, "exchange") == 0


def test_exchange_bytes_are_counted() -> None:
    path = checkpoint("T-MIX")
    run = decode(path, sequences(), num_ranks=2)
    assert all(counted(c, "exchange") > 0 for c in run.counters)


@pytest.mark.parametrize("name", ["T-QW3", "T-GLM-demo"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close(name: str, dtype: str) -> None:
    path = checkpoint(name)
    logits = decode(path, [random_prompt(33)], dtype=dtype, num_ranks=2, chunk=7).logits[0]
    reference = reference_logits(path, random_prompt(33))
    assert logits.dtype == torch.float32
    similarity = torch.nn.functional.cosine_similarity(logits, reference)
    assert similarity.mean() > 0.99


@pytest.mark.parametrize("name", ["T-OLM", "T-QW2"])
def test_weights_that_sum_to_less_than_one_do_not_drift(name: str) -> None:  # P-LOAD-12
    path = checkpoint(name)
    outcome = generate(path, [random_prompt(17)], params=greedy(64)).outcomes[0]
    assert len(outcome.tokens) == 64
    compare_with_reference(path, outcome)
