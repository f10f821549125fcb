"""Experts that move while others run: every bit of every token stays, whatever moves, fails or is aborted meanwhile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moewe.moe.wide_ep.balancing import Decision
from moewe.runtime.rebalancing import balancer
from tests.support.comparison import compare_runs
from tests.support.fixtures import checkpoint, random_prompt
from tests.support.harness import Group, Outcome, generate, greedy
from tests.support.layer_models import Bold
from tests.support.moves import random_decision
from tests.support.native import needs_native
from tests.support.setups import Setup
from tests.support.steered import steered

PROMPTS = [random_prompt(length, seed=length) for length in (33, 1, 17, 50, 9, 40)]
PARAMS = greedy(20, logprobs=2)
BITWISE = Setup(
    dtype="bfloat16", num_blocks=40, block_size=4, max_num_batched_tokens=24, keep_logits=False, eplb="auto"
)
ALONE = replace(BITWISE, eplb="off", num_blocks=256)


def bits(outcomes: list[Outcome]) -> list[object]:
    return [(one.tokens, [(p.token_ids, p.logprobs) for p in one.logprobs]) for one in outcomes]


def run_with_moves(group: Group, *, seed: int = 0, every: int = 4) -> list[Outcome]:
    """Run PROMPTS to their end, while a round of moves begins every few steps and one more request is aborted."""
    rng = np.random.default_rng(seed)
    outcomes = [group.submit(str(i), prompt, PARAMS, seed=1000 + i) for i, prompt in enumerate(PROMPTS)]
    group.submit("aborted", random_prompt(30), PARAMS)
    placement, number = group.placement, 0
    assert group.balancer is not None
    while group.step():
        number += 1
        if number == 7:
            group.abort("aborted")
        if number % every == 0 and group.balancer.is_open:
            decision = random_decision(placement, rng)
            if decision.moves:
                group.move(decision)
                placement = decision.placement
        if number % every == 2:
            group.hear()
    return outcomes


@needs_native
@pytest.mark.parametrize(
    ("topology", "changes"),
    [("EP2DP1[red=4]", {}), ("EP4DP1[red=6]", {}), ("EP4DP1", {"num_experts": 10})],
    ids=["EP2", "EP4", "ten experts at EP4"],  # P-LOAD-24: 3, 3, 2 and 2 slots
)
def test_moves_change_no_bit(topology: str, changes: dict[str, int]) -> None:
    path = checkpoint("T-QW3", dtype="bfloat16", **changes)
    expected = generate(path, PROMPTS, setup=ALONE, params=PARAMS)
    with Group(path, replace(BITWISE, topology=topology, num_blocks=19)) as group:
        outcomes = run_with_moves(group)
        stats = group.balancer.stats()
        assert group.num_preemptions and stats.rounds > 3 and stats.moves > 10 and not stats.failures
        held = np.concatenate([worker.moves._held for worker in group.workers], axis=1)
        assert (held != group.placement.physical_to_logical).any()
    assert bits(outcomes) == bits(expected.outcomes)


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        ("T-QW3", "EP2DP1[red=2]"),
        pytest.param("T-GOS", "EP2DP1[red=2]", marks=pytest.mark.slow),
        pytest.param("T-DS3", "EP2DP1[red=2]", marks=pytest.mark.slow),
        pytest.param("T-QW3", "EP4DP1[domains=2+2,red=2]", id="domains", marks=pytest.mark.slow),
        pytest.param("T-QW3", "EP4DP1[adp=2,atp=2,red=2]", id="divided-heads", marks=pytest.mark.slow),
    ],
)
def test_moves_of_unpacked_experts_keep_the_logits(name: str, topology: str) -> None:
    """In fp32 torch multiplies, biases included; products of other rows differ in the last bits."""
    path = checkpoint(name)
    expected = generate(path, PROMPTS, setup=Setup(), params=PARAMS)
    with Group(path, Setup(topology=topology, eplb="auto")) as group:
        outcomes = run_with_moves(group, every=6)
        assert group.balancer.stats().rounds > 1
    compare_runs(outcomes, expected.outcomes)


@needs_native
@pytest.mark.parametrize("exchange", ["all_to_all", "padded"])
def test_moves_over_other_exchanges_change_no_bit(exchange: str) -> None:
    path = checkpoint("T-QW3", dtype="bfloat16")
    expected = generate(path, PROMPTS, setup=ALONE, params=PARAMS)
    with Group(path, replace(BITWISE, topology="EP2DP1[red=2]", exchange=exchange)) as group:
        outcomes = run_with_moves(group)
        assert group.balancer.stats().rounds > 1
    assert bits(outcomes) == bits(expected.outcomes)


@needs_native
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_moves_of_quantised_experts_change_no_bit(quantization: str) -> None:
    path = checkpoint("T-QW3", dtype="bfloat16")
    setup = replace(BITWISE, quantization=quantization)
    expected = generate(path, PROMPTS, setup=replace(setup, eplb="off", num_blocks=256), params=PARAMS)
    with Group(path, replace(setup, topology="EP2DP1[red=2]")) as group:
        outcomes = run_with_moves(group)
        assert group.balancer.stats().rounds > 1
    assert bits(outcomes) == bits(expected.outcomes)


@needs_native
def test_a_read_that_fails_on_one_rank_keeps_everybody_where_they_are(caplog: pytest.LogCaptureFixture) -> None:
    path = checkpoint("T-QW3", dtype="bfloat16")
    expected = generate(path, PROMPTS, setup=ALONE, params=PARAMS)
    with Group(path, replace(BITWISE, topology="EP2DP1[red=2]")) as group:
        outcomes = [group.submit(str(i), prompt, PARAMS, seed=1000 + i) for i, prompt in enumerate(PROMPTS)]
        reader = group.workers[1].moves._reader
        read, rng = reader.read, np.random.default_rng(0)

        def fail(layer: int, expert: int) -> None:
            raise OSError("the disk is gone")

        reader.read = fail
        held = [worker.moves._held.copy() for worker in group.workers]
        while True:
            decision = random_decision(group.placement, rng)
            if needs_a_read(group, decision, rank=1):
                break
        group.move(decision)
        group.hear()
        for _ in range(6):
            group.step()
        assert group.balancer.is_open and group.balancer.stats().failures == 1 and group.balancer.stats().rounds == 0
        assert "rank 1 cannot prepare" in caplog.text and "the disk is gone" in caplog.text
        assert all((worker.moves._held == before).all() for worker, before in zip(group.workers, held))
        assert all(worker.moves.placement == 0 for worker in group.workers)
        reader.read = read
        group.move(decision)
        group.hear()
        while group.step():
            pass
        assert group.balancer.stats().rounds == 1, "the next try succeeds"
    assert bits(outcomes) == bits(expected.outcomes)


def needs_a_read(group: Group, decision: Decision, *, rank: int) -> bool:
    """Tell whether `rank` has to read an expert that it does not hold."""
    start, stop = group.placement.slot_ranges[rank]
    held = group.placement.physical_to_logical[:, start:stop]
    return any(start <= move.slot < stop and move.expert not in held[move.layer] for move in decision.moves)


def test_a_rank_that_has_not_prepared_refuses_the_step() -> None:
    with Group(checkpoint("T-QW3"), Setup(topology="EP2DP1", eplb="auto")) as group:
        with pytest.raises(RuntimeError, match="placement 1 is to hold on rank 0, but 0 does and none is"):
            group.workers[0].moves.switch(1)


@needs_native
def test_traffic_itself_moves_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole circle: counted windows, a decision, a round; all tokens choose two experts of rank 0."""
    path = steered(0, 1, dtype="bfloat16", num_experts_per_tok=2)
    monkeypatch.setattr(balancer, "COUNT_EVERY_S", 0.0)
    monkeypatch.setattr(balancer, "DECIDE_SHARE", 1e9)

    prompts = [random_prompt(40, seed=i % 3) for i in range(20)]
    setup = replace(BITWISE, topology="EP2DP1", num_blocks=256)
    with Group(path, setup, layer_model=Bold(((0, 4), (4, 8))), least_tokens=64) as group:
        for i, prompt in enumerate(prompts):
            group.submit(str(i), prompt, greedy(8))
        while group.step():
            group.hear(wait=False)
        stats = group.balancer.stats()
        assert stats.moves > 0 and stats.predicted_seconds > 0 and stats.realised_seconds > 0
        now = np.concatenate([worker.moves._held for worker in group.workers], axis=1)
        assert (np.frombuffer(stats.slots, np.int32) == now[0]).all(), "what is shown is what ranks hold"
        apart = [len({slots.index(0) // 4, slots.index(1) // 4}) for slots in now.tolist()]
        assert max(apart) == 2, "the two experts stand on two ranks"
    expected = generate(path, prompts, setup=ALONE, params=greedy(8)).outcomes
    assert [outcome.tokens for outcome in group.outcomes.values()] == [outcome.tokens for outcome in expected]
