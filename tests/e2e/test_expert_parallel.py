"""What expert parallelism must keep: idle ranks in step, unequal ranks, the same answers, empty and crowded experts."""

from collections import Counter

import pytest
import torch

from moewe.moe.wide_ep.exchanges import ShmShape, ThreadExchange
from moewe.runtime.messages import Stats
from moewe.runtime.metrics.ranks import ReplicaMetrics
from moewe.runtime.metrics.stats import encode_counters, rank_stats
from tests.support.comparison import compare_runs, compare_with_reference
from tests.support.fixtures import (
    MOE_FIXTURES,
    checkpoint,
    random_prompt,
)
from tests.support.harness import Group, generate, greedy
from tests.support.matrix import UNLIKE
from tests.support.setups import Setup
from tests.support.steered import steered

ONE_RANK = Setup()
TOPOLOGIES = ("EP2DP1", "EP4DP1", "EP2DP2", "EP4DP2")
ALWAYS = ("T-QW3", "T-DS3", "T-GOS")  # in every topology; the others in two of them, turn by turn
SPREAD = [
    pytest.param(
        name, topology, marks=() if name == ALWAYS[0] or (turn % 4 == i and name in UNLIKE) else pytest.mark.slow
    )
    for turn, name in enumerate(MOE_FIXTURES)
    for i, topology in enumerate(TOPOLOGIES)
    if name in ALWAYS or turn % 2 == i % 2
]


def poison_allocator():
    """Leave NaN in memory that the allocator will hand out again."""
    blocks = [torch.full((size,), float("nan")) for size in (64, 256, 1024, 4096, 16384, 65536) for _ in range(20)]
    del blocks


# --- P-EP-01 ----------------------------------------------------------------------------------------------------------
def test_idle_ranks_keep_step():
    path = checkpoint("T-QW3")
    with Group(path, Setup(topology="EP4DP1")) as group:
        group.submit("alone", random_prompt(12), greedy(64))
        group.run()
        assert {sum(row > 0 for row in step.rows) for step in group.steps} == {1}
        for length in (1, 17, 200):
            group.submit(f"of-{length}", random_prompt(length, seed=length), greedy(16))
        group.run()
        group.submit("again", random_prompt(12), greedy(64))
        outcomes = group.run()
        steps = [worker.counters.steps.sum() for worker in group.workers]
        assert steps == [len(group.steps)] * 4
        assert outcomes["again"].tokens == outcomes["alone"].tokens
    alone = generate(path, [random_prompt(length, seed=length) for length in (1, 17, 200)], setup=ONE_RANK)
    compare_runs([outcomes[f"of-{length}"] for length in (1, 17, 200)], alone.outcomes)


# --- P-EP-02 ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("short", "long"), [(1, 509), (7, None), (3, 4096)], ids=["509-vs-1", "0-vs-7", "3-vs-4096"])
def test_ranks_with_unequal_rows(short, long):
    path = checkpoint("T-QW3", max_position_embeddings=8192)
    prompts = [random_prompt(short), *([random_prompt(long, seed=1)] if long else [])]
    with Group(path, Setup(topology="EP2DP1", num_blocks=300)) as group:
        group.submit("0", prompts[0], greedy(24))
        group.step()  # it decodes on rank 0 while the long prompt fills rank 1
        if long:
            group.submit("1", prompts[1], greedy(4))
        outcomes = list(group.run().values())
        rows = {step.rows for step in group.steps}
    if long:
        assert any(row[0] <= 3 and row[1] >= 500 for row in rows), rows
    else:
        assert all(row[1] == 0 for row in rows), rows
    alone = generate(path, prompts, setup=Setup(num_blocks=600), params=[greedy(24), greedy(4)][: len(prompts)])
    compare_runs(outcomes, alone.outcomes)


# --- P-EP-03 ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "topology"), SPREAD)
def test_every_topology_answers_as_one_rank_does(name, topology):
    path = checkpoint(name)
    prompts = [random_prompt(length, seed=length) for length in (33, 1, 17, 50, 5, 34, 2, 9)]
    alone = generate(path, prompts, setup=ONE_RANK, params=greedy(6))
    spread = generate(path, prompts, setup=Setup(topology=topology), params=greedy(6))
    compare_runs(spread.outcomes, alone.outcomes)
    for group in spread.groups:  # the harness checks every step: sum over experts = rows * top_k
        assert all(worker.counters.unowned_ids == 0 for worker in group.workers)
        assert sum(step.expert_rows.sum() for step in group.steps) > 0


# --- P-EP-04 ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("topology", ["EP1DP1", "EP2DP1", "EP4DP1"])
def test_experts_and_ranks_without_tokens(topology):
    path = steered(0, 1, num_experts_per_tok=2)
    prompts = [random_prompt(length, seed=length) for length in (33, 8, 1)]
    with Group(path, Setup(topology=topology)) as group:
        group.submit("warm", random_prompt(400, seed=9), greedy(2))
        group.run()
        poison_allocator()
        for i, prompt in enumerate(prompts):
            group.submit(str(i), prompt, greedy(16))
        outcomes = group.run()
        per_expert = group.rows_per_expert()
    for i in range(len(prompts)):
        compare_with_reference(path, outcomes[str(i)])
    assert (per_expert[:, 2:] == 0).all()
    assert (per_expert[:, :2] > 0).all()


# --- P-EP-05 ----------------------------------------------------------------------------------------------------------
def test_one_expert_receives_everything():
    path = steered(7, num_experts_per_tok=2, max_position_embeddings=8192)
    prompt = random_prompt(4096)
    setup = Setup(topology="EP4DP1", num_blocks=300, max_num_batched_tokens=4096)
    with Group(path, setup) as group:
        outcome = group.submit("long", prompt, greedy(4))
        group.run()
        per_expert = group.rows_per_expert()
        num_rows = sum(sum(step.rows) for step in group.steps)
        shown = exported_imbalance(group)
    assert shown["rank"] >= 2.0, "rank 3 got half of all rows at least, a fourth would be even"
    assert shown["slot"] >= 4.0, "expert 7 got half of all rows at least, an eighth would be even"
    compare_with_reference(path, outcome)
    assert (per_expert[:, 7] == num_rows).all(), "a row missed expert 7"
    assert (per_expert.sum(1) == 2 * num_rows).all(), "rows were dropped"
    received = max(int(step.expert_rows.max()) for step in group.steps)
    assert 4096 <= received <= 2 * setup.max_num_batched_tokens, "one rank of four has rows in a step"


def test_a_crowd_takes_no_more_memory_than_the_budget_allows(monkeypatch):
    """All ranks fill their budget with rows for one rank: it receives all of them, just what its buffers are for."""
    arrived = Counter()  # the most of a rank's dispatches
    dispatch = ThreadExchange.dispatch

    def watched(exchange, x, physical_ids):
        found = dispatch(exchange, x, physical_ids)
        assert found.num_rows == int(found.tokens_per_slot.sum())
        arrived[exchange] = max(arrived[exchange], found.num_rows)
        return found

    monkeypatch.setattr(ThreadExchange, "dispatch", watched)
    path = steered(6, 7, num_experts_per_tok=2)  # both are of the last rank
    num_ranks, budget, top_k = 4, 64, 2
    setup = Setup(topology=f"EP{num_ranks}DP1", num_blocks=64, max_num_batched_tokens=budget)
    with Group(path, setup) as group:
        for i in range(2 * num_ranks):
            group.submit(str(i), random_prompt(150, seed=i), greedy(4))
        group.run()
        assert max(min(step.rows) for step in group.steps) == budget, "ranks were never full together"
        limit = ShmShape(
            slot_ranges=group.placement.slot_ranges, capacity=budget, top_k=top_k, width=1, dtype=torch.float32
        ).result_capacity
    most = sorted(arrived.values())
    assert len(most) == num_ranks and most[:-1] == [0] * (num_ranks - 1), "rows for experts that nobody chose"
    assert most[-1] == num_ranks * budget * top_k == limit


def exported_imbalance(group):
    """What /metrics would show for `group`, by level."""
    metrics = ReplicaMetrics(0)
    ranks = [
        rank_stats(rank, encode_counters(worker.counters), used_blocks=0, total_blocks=1)
        for rank, worker in enumerate(group.workers)
    ]
    metrics.observe(Stats(num_running=0, num_waiting=0, num_preemptions=0, num_steps=1, ranks=tuple(ranks)), 1.0)
    return {labels[1]: value for name, labels, value in metrics.samples() if name == "moewe_expert_imbalance_ratio"}
