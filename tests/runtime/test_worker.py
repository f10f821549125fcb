"""One rank at work: errors stay with their sequence, log-probabilities, counters, and what it reports of memory."""

import numpy as np
import pytest
import torch

from moewe.native.library import load
from moewe.runtime.counter_reports import CounterReports
from moewe.runtime.metrics.stats import decode_counters, rank_stats
from moewe.runtime.plan import RankPlan, StepHeader
from moewe.telemetry import COMPONENTS, PHASES
from tests.support.comparison import compare_runs
from tests.support.fixtures import checkpoint, copy_checkpoint, random_prompt, rewrite_tensors
from tests.support.harness import Group, generate, greedy
from tests.support.numerics import LOGPROBS
from tests.support.setups import Setup

ILL = 500  # a token whose embedding is not finite


def ill_checkpoint(name="T-QW3", value=float("nan")):
    def change(tensors):
        tensors["model.embed_tokens.weight"][ILL, 5] = value
        return tensors

    return rewrite_tensors(copy_checkpoint(checkpoint(name)), change)


def healthy_prompt(length, seed):
    return [token if token != ILL else 3 for token in random_prompt(length, seed=seed)]


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("topology", ["EP1DP1", "EP2DP1"])
def test_a_sequence_that_is_not_finite_ends_alone(topology, value):
    """It is the first, so it owns block 0, with which the tables of all others are padded."""
    path = ill_checkpoint(value=value)
    prompts = [healthy_prompt(length, seed=length) for length in (3, 60, 20, 5)]
    alone = generate(path, prompts, params=greedy(8))
    with Group(path, Setup(topology=topology, num_blocks=20)) as group:
        ill = group.submit("ill", [5, ILL, 7], greedy(8))
        mates = [group.submit(str(i), prompt, greedy(8)) for i, prompt in enumerate(prompts)]
        group.run()
        later = [group.submit(f"later {i}", prompt, greedy(8)) for i, prompt in enumerate(prompts)]
        group.run()
        for worker in group.workers:
            for layer in range(group.model.num_layers):
                assert all(bool(torch.isfinite(part).all()) for part in worker.storage.layer(layer))
    assert (ill.tokens, ill.finish_reason) == ([], "error")
    assert "not finite" in ill.error
    compare_runs(mates, alone.outcomes)
    compare_runs(later, alone.outcomes)


@pytest.mark.parametrize("name", ["T-GOS", "T-DS2"])
def test_with_windows_and_latents_too_an_ill_sequence_harms_nobody_who_takes_its_blocks(name):
    """Blocks of a window change hands while their owner runs: it is ill at its last token, others hold its first."""
    path = ill_checkpoint(name)
    prompts = [healthy_prompt(length, seed=length) for length in (40, 30, 9)]
    setup = Setup(num_blocks=70, block_size=2, max_chunk_tokens=8)
    alone = generate(path, prompts, params=greedy(12), setup=setup)
    with Group(path, setup) as group:
        mates = [group.submit(str(i), prompt, greedy(12)) for i, prompt in enumerate(prompts)]
        ill = group.submit("ill", [*healthy_prompt(29, seed=4), ILL], greedy(8))
        group.run()
        later = [group.submit(f"later {i}", prompt, greedy(12)) for i, prompt in enumerate(prompts)]
        group.run()
        for layer in range(group.model.num_layers):
            assert all(bool(torch.isfinite(part).all()) for part in group.workers[0].storage.layer(layer))
    assert (ill.tokens, ill.finish_reason) == ([], "error")
    compare_runs(mates, alone.outcomes)
    compare_runs(later, alone.outcomes)


def test_what_float16_cannot_hold_ends_one_request_with_a_hint():
    """A weight of 7e4 is finite in the checkpoint and in bfloat16."""
    path = ill_checkpoint(value=7e4)
    prompt = healthy_prompt(20, seed=1)
    with Group(path, Setup(dtype="float16")) as group:
        ill = group.submit("ill", [5, ILL, 7], greedy(8))
        mate = group.submit("mate", prompt, greedy(8))
        group.run()
    assert (ill.tokens, ill.finish_reason) == ([], "error")
    assert "not finite" in ill.error and "bfloat16" in ill.error
    assert (len(mate.tokens), mate.finish_reason) == (8, "length")
    fine = generate(path, [[5, ILL, 7]], setup=Setup(dtype="bfloat16"), params=greedy(8)).outcomes[0]
    assert (len(fine.tokens), fine.finish_reason) == (8, "length")


@pytest.mark.parametrize(("max_tokens", "long"), [(4, False), (60, True)])
def test_rows_of_sequences_that_may_grow_long_are_marked(max_tokens, long):
    with Group(checkpoint("T-PHI"), Setup()) as group:
        scaling = group.model.rotary.scaling
        assert 30 < scaling.original_max_position < 70
        seen = []
        group.workers[0].observer = lambda forward, hidden, ids: seen.append(forward.long_rows.tolist())
        group.submit("a", random_prompt(10), greedy(max_tokens))
        group.run()
    assert seen[0] == [long] * 10
    assert all(marks == [long] for marks in seen[1:])


def test_other_models_mark_no_rows():
    with Group(checkpoint("T-MIX"), Setup()) as group:
        seen = []
        group.workers[0].observer = lambda forward, hidden, ids: seen.append(forward.long_rows)
        group.submit("a", random_prompt(10), greedy(2))
        group.run()
    assert seen == [None, None]


def test_a_long_prompt_that_is_not_finite_ends_at_its_first_ill_chunk():
    path = ill_checkpoint()
    prompt = healthy_prompt(100, seed=1)
    prompt[3] = ILL
    with Group(path, Setup(max_chunk_tokens=8)) as group:
        ill = group.submit("ill", prompt, greedy(8))
        mate = group.submit("mate", healthy_prompt(30, seed=2), greedy(8))
        group.run()
        num_rows = sum(sum(step.rows) for step in group.steps)
    assert (ill.tokens, ill.finish_reason, mate.finish_reason) == ([], "error", "length")
    assert num_rows <= 30 + 8 + 8 + 8  # the mate, the ill chunk, and none after it


def test_logprobs_are_those_of_the_raw_logits():
    path = checkpoint("T-OLM")
    params = [greedy(5, logprobs=4), greedy(5), greedy(5, logprobs=0, temperature=0.7, seed=3)]
    run = generate(path, [random_prompt(9, seed=i) for i in range(3)], params=params)
    assert run.outcomes[1].logprobs == []
    for number, num_top in ((0, 4), (2, 0)):
        outcome = run.outcomes[number]
        assert len(outcome.logprobs) == 5
        for i, entry in enumerate(outcome.logprobs):
            wanted = outcome.logits[len(outcome.prompt) - 1 + i].log_softmax(-1)
            assert entry.token_ids[0] == outcome.tokens[i]
            assert len(entry.token_ids) == len(entry.logprobs) == 1 + num_top
            assert list(entry.token_ids[1:]) == wanted.topk(num_top).indices.tolist()
            assert np.allclose(entry.logprobs, wanted[list(entry.token_ids)], atol=LOGPROBS)
            assert entry.rank == int((wanted >= wanted[outcome.tokens[i]]).sum())


def test_counters_say_what_ran_and_nothing_of_the_warm_up():
    path = checkpoint("T-QW2")
    with Group(path, Setup(topology="EP2DP1")) as group:
        for worker in group.workers:
            assert not worker.counters.steps.any()
            assert not worker.counters.expert_tokens.any()
        group.submit("a", random_prompt(10), greedy(6))
        group.submit("b", random_prompt(10, seed=1), greedy(6))
        group.run()
        rows = np.array([step.rows for step in group.steps])
        for rank, worker in enumerate(group.workers):
            counters = worker.counters
            by_phase = dict(zip(PHASES, counters.steps.tolist(), strict=True))
            assert by_phase == {"prefill": 1, "decode": 5, "mixed": 0, "idle": 0}
            assert counters.tokens.sum() == rows[:, rank].sum() == 15
            assert (counters.busy_seconds[counters.steps > 0] > 0).all()
            moved = dict(zip(COMPONENTS, counters.bytes_moved.sum(0).tolist(), strict=True))
            assert all(moved[name] > 0 for name in ("attention", "routed", "shared", "dense", "kv", "exchange")), moved
        total = sum(worker.counters.expert_tokens.sum(1) for worker in group.workers)
        assert (total == 30 * group.top_k).all()


def test_counters_travel_with_results_at_the_latest_when_nothing_runs_any_more():
    with Group(checkpoint("T-MIX"), Setup()) as group:
        results = []
        apply = group.scheduler.apply
        group.scheduler.apply = lambda result: results.append(result) or apply(result)
        group.submit("a", random_prompt(10), greedy(6))
        group.run()
        last = results[-1].ranks[0].counters
        sent = decode_counters(rank_stats(0, last, used_blocks=0, total_blocks=1))
        assert sent.tokens.tolist() == group.workers[0].counters.tokens.tolist()
        assert sent.steps.tolist() == group.workers[0].counters.steps.tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_memory_is_reported_in_exact_bytes(dtype):
    path = checkpoint("T-MIX", dtype=dtype)
    with Group(path, Setup(dtype="auto", num_blocks=20, block_size=4)) as whole:
        pass
    with Group(path, Setup(topology="EP4DP1", dtype="auto", num_blocks=20, block_size=4)) as parts:
        itemsize = parts.workers[0].number_format.itemsize
    expert_bytes = 2 * 8 * 3 * 64 * 96 * itemsize  # layers, experts, matrices
    for loaded in parts.loaded:
        assert loaded.num_blocks == 20
        assert loaded.weight_bytes == whole.loaded[0].weight_bytes - expert_bytes * 3 // 4
        assert loaded.weight_bytes <= loaded.weight_bytes_read < whole.loaded[0].weight_bytes
    for allocated in parts.allocated:
        assert allocated.memory_bandwidth > 1e8
        assert all(rate > 1e8 for rate in allocated.matrix_rates.values())
        assert list(allocated.matrix_rates) == (["bfloat16", "int8"] if load() is not None else [])
    kv_bytes = 2 * 2 * 2 * 16 * itemsize * 20 * 4  # layers, K and V, heads, width; 20 blocks of 4 tokens
    assert [worker.storage.num_bytes for worker in parts.workers] == [kv_bytes] * 4


def header(step, **changes):
    return StepHeader(**{"step": step, "epoch": 0, "kind": "decode", "bucket": 1, "exchange": "local", **changes})


def test_a_rank_objects_to_a_step_that_it_does_not_expect():
    with Group(checkpoint("T-MIX"), Setup()) as group:
        worker = group.workers[0]
        group.submit("a", random_prompt(10), greedy(6))
        for _ in range(4):
            group.step()
        while group._in_flight:
            group._collect()
        step = worker._next_step
        with pytest.raises(RuntimeError, match=f"step {step + 1} came to rank 0, but step {step} is next"):
            worker.run(header(step + 1), RankPlan(num_decodes=1))
        with pytest.raises(RuntimeError, match="uses the exchange 'threads', but rank 0 joined 'local'"):
            worker.run(header(step, exchange="threads"), RankPlan(num_decodes=1))
        with pytest.raises(RuntimeError, match=rf"step {step} overlaps \(halves\), but rows do not travel in 'local'"):
            worker.run(header(step, overlap="halves"), RankPlan(num_decodes=1))
        with pytest.raises(RuntimeError, match=f"step {step}: 1 sequences decode on rank 0, but the plan counts 0"):
            worker.run(header(step), RankPlan())


def test_a_snapshot_may_come_with_any_number():
    with Group(checkpoint("T-MIX"), Setup()) as group:
        worker = group.workers[0]
        worker.run(header(41, snapshot=True, kind="idle", bucket=0), RankPlan())
        worker.run(header(42, kind="idle", bucket=0), RankPlan())
        with pytest.raises(RuntimeError, match="step 44"):
            worker.run(header(44), RankPlan())


def test_counters_of_a_request_that_ended_elsewhere_are_asked_for():
    with Group(checkpoint("T-MIX"), Setup()) as group:
        worker = group.workers[0]
        worker._reports = CounterReports(worker.counters, clock=lambda: 0.0)  # they are never due in time
        assert worker.late_counters() == b""
        group.submit("a", random_prompt(10), greedy(60))
        for _ in range(5):
            group.step()
        group.abort("a")
        group.run()
        late = decode_counters(rank_stats(0, worker.late_counters(), used_blocks=0, total_blocks=1))
        assert late.steps.tolist() == worker.counters.steps.tolist()
        assert worker.late_counters() == b""
