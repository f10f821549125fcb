"""Ten thousand steps at EP4 over all exchanges: random arrivals and aborts, idle ranks, preemptions, snapshots, moves.

Nothing hangs, no block and no memory is lost, and every request that was not aborted has the tokens of one rank; where
domains add up for themselves, the tokens that it has there in other company. Ranks are threads, kernels native.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace

import numpy as np
import psutil
import pytest

from moewe.runtime.params import SamplingParams
from tests.support.fixtures import checkpoint, random_prompt
from tests.support.harness import Group, generate
from tests.support.moves import random_decision
from tests.support.native import needs_native
from tests.support.setups import Setup

pytestmark = [needs_native, pytest.mark.slow, pytest.mark.timeout(240)]

# Ten thousand in all, the fewer of them the longer a step takes: ranks of the last one wait for emulated links.
STEPS = {"threads": 2000, "shm": 4500, "all_to_all": 1250, "padded": 1250, "hierarchical": 1000}
MOST_GROWTH = 64 << 20  # bytes, after a fifth of the steps: allocators keep what was once used
TIGHT = Setup(dtype="bfloat16", num_blocks=14, block_size=4, max_num_batched_tokens=24, keep_logits=False, eplb="auto")
WAYS = {
    "threads": replace(TIGHT, topology="EP4DP1[red=4]"),
    "shm": replace(TIGHT, topology="EP4DP1", exchange="shm"),
    "all_to_all": replace(TIGHT, topology="EP4DP1", exchange="all_to_all", overlap="on"),
    "padded": replace(TIGHT, topology="EP4DP1", exchange="padded"),
    "hierarchical": replace(TIGHT, topology="EP4DP1[domains=2+2]", overlap="on"),
}


@dataclass(frozen=True)
class Asked:
    """A request and what came of it."""

    prompt: list[int]
    params: SamplingParams
    tokens: list[int]


class Traffic:
    """Requests that come in bursts of changing density, so that ranks fall idle and run full in turns."""

    def __init__(self, group: Group, seed: int) -> None:
        self._group, self._rng = group, np.random.default_rng(seed)
        self._rate, self._live = 0.2, []
        # Where domains add up for themselves, another domain for an expert is another order of sums.
        self._keeps_domains = "domains" in group.setup.topology
        self.asked: dict[str, tuple[list[int], SamplingParams]] = {}

    def go_on(self) -> None:
        """Let something happen, or nothing, before the next step."""
        rng = self._rng
        if rng.random() < 0.02:
            self._rate = float(rng.choice([0.02, 0.2, 0.8]))
        self._live = [name for name in self._live if self._group.outcomes[name].finish_reason is None]
        if rng.random() < self._rate and len(self._live) < 16:
            self._ask()
        if self._live and rng.random() < 0.01:
            self._group.abort(str(rng.choice(self._live)))
        if rng.random() < 0.004:
            self._group.snapshot()
        self._group.hear(wait=False)
        if rng.random() < 0.02 and self._group.balancer.is_open:
            # Where experts stand: the policy, to which these moves look like losses, takes some of them back.
            decision = random_decision(self._group.standing, rng, within_domains=self._keeps_domains)
            if decision.moves:
                self._group.move(decision)

    def _ask(self) -> None:
        rng, number = self._rng, len(self.asked)
        prompt = random_prompt(int(rng.integers(1, 30)), seed=number)
        seeded = {"temperature": 0.8, "top_p": 0.9, "seed": number} if number % 2 else {"temperature": 0.0}
        params = SamplingParams(max_tokens=int(rng.integers(1, 24)), ignore_eos=True, **seeded)
        name = f"r{number}"
        self.asked[name] = (prompt, params)
        self._live.append(name)
        self._group.submit(name, prompt, params)


def fuzz(way: str, seed: int) -> list[Asked]:
    """Run the steps of a way and what is left after them; return the requests that ran to their end."""
    steps = STEPS[way]
    with Group(checkpoint("T-QW3", dtype="bfloat16"), WAYS[way]) as group:
        traffic, sizes = Traffic(group, seed), []
        for until in (steps // 5, steps):
            while len(group.steps) < until:
                traffic.go_on()
                group.step()
            gc.collect()
            sizes.append(psutil.Process().memory_info().rss)
        assert sizes[1] - sizes[0] < MOST_GROWTH
        outcomes = group.run()
        assert way in {step.exchange for step in group.steps}
        assert group.num_preemptions > steps / 100
        stats = group.balancer.stats()
        assert stats.rounds > steps / 100 and not stats.failures
        idle = sum(0 in step.rows for step in group.steps)
        assert idle > steps / 20, "ranks were hardly ever idle"
        assert all(outcome.error is None for outcome in outcomes.values())
        ended = {name: outcome for name, outcome in outcomes.items() if outcome.finish_reason == "length"}
        assert len(ended) + sum(o.finish_reason == "abort" for o in outcomes.values()) == len(outcomes)
        return [Asked(*traffic.asked[name], outcome.tokens) for name, outcome in ended.items()]


@pytest.mark.parametrize("way", WAYS)
def test_ten_thousand_steps_over_all_exchanges(way: str) -> None:
    setup = WAYS[way]
    asked = fuzz(way, seed=1)
    assert len(asked) > STEPS[way] / 20
    alone = replace(setup, num_blocks=1024, max_num_batched_tokens=512, overlap="off", eplb="off")
    if way != "hierarchical":  # which adds up inside of domains first
        alone = replace(alone, topology="EP1DP1", exchange="auto")
    run = generate(
        checkpoint("T-QW3", dtype="bfloat16"),
        [one.prompt for one in asked],
        setup=alone,
        params=[one.params for one in asked],
    )
    wrong = [i for i, (one, other) in enumerate(zip(asked, run.outcomes, strict=True)) if one.tokens != other.tokens]
    assert not wrong, f"{len(wrong)} of {len(asked)} requests, the first: {wrong[0]}"
