"""A very long prompt does not stop others' tokens: chunks of it share every step with those who decode."""

from __future__ import annotations

import pytest

from moewe.runtime.scheduler import GroupLimits, SchedulerConfig
from tests.support.comparison import compare_with_reference
from tests.support.fixtures import checkpoint, random_prompt, reference_greedy
from tests.support.harness import Group, greedy
from tests.support.null_worker import NullEngine, make_request
from tests.support.setups import Setup

CHUNK = 64


@pytest.mark.parametrize("topology", ["EP1DP1", "EP2DP1"])
def test_short_requests_end_while_a_long_prompt_runs(topology):
    path = checkpoint("T-QW3", max_position_embeddings=8192)
    shorts = {f"short-{i}": random_prompt(5 + 9 * i, seed=i) for i in range(4)}
    setup = Setup(topology=topology, num_blocks=300, max_num_batched_tokens=CHUNK, keep_logits=False)
    with Group(path, setup) as group:
        long = group.submit("long", random_prompt(4100), greedy(4))
        for _ in range(3):
            group.step()
        outcomes = {name: group.submit(name, prompt, greedy(16)) for name, prompt in shorts.items()}
        before = len(group.steps)
        while any(outcome.finish_reason is None for outcome in outcomes.values()):
            group.step()
        assert not long.tokens, "the long prompt was done first: nothing was shown"
        taken = len(group.steps) - before
        group.run()
        assert long.finish_reason == "length"
    assert taken <= 16 + 12, f"{taken} steps for 16 tokens"
    for name, prompt in shorts.items():
        assert outcomes[name].tokens == reference_greedy(path, prompt, 16)


def test_the_long_prompt_is_answered_right():
    path = checkpoint("T-QW3", max_position_embeddings=8192)
    with Group(path, Setup(num_blocks=300, max_num_batched_tokens=512)) as group:
        long = group.submit("long", random_prompt(4100), greedy(4))
        group.submit("short", random_prompt(9), greedy(40))
        group.run()
    compare_with_reference(path, long)


@pytest.mark.slow
def test_thirty_thousand_tokens_stop_nobody():
    config = SchedulerConfig(
        num_ranks=1,
        groups=(GroupLimits(num_blocks=2200),),
        block_size=16,
        max_model_len=32768,
        max_num_seqs=16,
        max_num_batched_tokens=CHUNK,
    )
    engine = NullEngine(config)
    long = make_request("long", 30_000, 4)
    engine.add(long)
    done = []
    for turn in range(20):
        shorts = [make_request(f"short-{turn}-{i}", 3 + i, 8) for i in range(4)]
        engine.add(*shorts)
        begin = engine.num_steps
        while any(short.request_id not in engine.reasons for short in shorts):
            engine.step()
        assert engine.num_steps - begin <= 8 + 6
        done += shorts
    assert not engine.tokens["long"], "the long prompt was done first: nothing was shown"
    engine.run()
    engine.check_tokens([long, *done])
