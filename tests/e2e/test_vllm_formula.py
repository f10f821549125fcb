"""Where vLLM's published formula for MoE traffic goes wrong, beside what ranks counted in the same decode steps.

Bytes that were counted are those of the tensors touched (test_counted_bytes.py). The formula divides one rank's tokens
among all ranks, lets no two tokens share an expert, and knows of no scales (tests/support/vllm_estimate.py).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moewe.telemetry import COMPONENTS, PHASES
from tests.support.fixtures import checkpoint, random_prompt
from tests.support.harness import Group, greedy
from tests.support.native import needs_native
from tests.support.setups import Setup
from tests.support.vllm_estimate import FfnEstimate

DECODE, NEW_TOKENS = PHASES.index("decode"), 9


def estimate(path: Path, ranks: int, bytes_a_weight: float = 4.0) -> FfnEstimate:
    """Return the formula for a fixture on so many ranks, each with tokens of its own."""
    config = json.loads((path / "config.json").read_text())
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next(config[name] for name in names if name in config)
    return FfnEstimate(
        D=config["hidden_size"], MI=config["moe_intermediate_size"], E=num_experts, Ek=config["num_experts_per_tok"],
        S=config.get("n_shared_experts", 0), Lm=config["num_hidden_layers"] - config.get("first_k_dense_replace", 0),
        DP=ranks, TP=1, b=bytes_a_weight,
    )  # fmt: skip


def decoded(path: Path, topology: str, prompts: list[list[int]], **setup: object) -> list[dict[str, float]]:
    """Run prompts, and return what each rank read in a decode step, in the mean, by component."""
    with Group(path, Setup(topology=topology, keep_logits=False, **setup)) as group:
        for number, prompt in enumerate(prompts):
            group.submit(str(number), prompt, greedy(NEW_TOKENS))
        group.run()
        found = []
        for worker in group.workers:
            moved, steps = worker.counters.bytes_moved[DECODE], worker.counters.steps[DECODE]
            assert steps == NEW_TOKENS - 1
            found.append(dict(zip(COMPONENTS, (moved / steps).tolist())))
        return found


def test_idle_ranks_read_their_experts_and_are_said_to_read_nothing() -> None:
    """One request on four ranks: three have no tokens, and the experts that its token chose all the same."""
    path = checkpoint("T-QW3")
    counted, formula = decoded(path, "EP4DP1", [random_prompt(5)]), estimate(path, 4)
    an_expert = 3 * formula.D * formula.MI * formula.b
    assert sum(rank["routed"] for rank in counted) == formula.Lm * formula.Ek * an_expert
    assert all(rank["routed"] > 0 for rank in counted[1:])
    assert formula.routed_read_bytes(T=0) == 0 and formula.flops(T=0) == 0


def test_few_tokens_are_rounded_to_no_expert_at_all() -> None:
    """With more ranks than a token has experts, a rank with one token books none, and so does every other."""
    path = checkpoint("T-QW3", num_experts_per_tok=2)
    counted, formula = decoded(path, "EP4DP1", [random_prompt(5)]), estimate(path, 4)
    assert sum(rank["routed"] for rank in counted) == formula.Lm * 2 * 3 * formula.D * formula.MI * formula.b
    assert formula.routed_read_bytes(T=1) == 0 and formula.flops(T=1) == 0


def test_tokens_of_other_ranks_are_left_out() -> None:
    """One request on each of four ranks: experts are hit by the tokens of all, and booked by those of one."""
    path = checkpoint("T-QW3")
    prompts = [random_prompt(5, seed=seed) for seed in range(4)]
    counted, formula = decoded(path, "EP4DP1", prompts), estimate(path, 4)
    really = sum(rank["routed"] for rank in counted)
    assert really > 1.5 * 4 * formula.routed_read_bytes(T=1)


def test_tokens_that_share_experts_are_booked_apart() -> None:
    """Eight sequences of the same text choose the same experts: one token's, not eight times as many."""
    path = checkpoint("T-QW3")
    (counted,) = decoded(path, "EP1DP1", [random_prompt(5)] * 8)
    formula = estimate(path, 1)
    assert counted["routed"] == formula.routed_read_bytes(T=1)
    assert formula.routed_read_bytes(T=8) == min(8, formula.E / formula.Ek) * counted["routed"] > counted["routed"]


@pytest.mark.parametrize("name", ["T-QW2", "T-DS3"])
def test_shared_experts_are_wrong_where_the_config_words_them_otherwise(name: str) -> None:
    """Qwen2-MoE says how wide its shared expert is, which is not looked for; DeepSeek's are as wide as they should."""
    path = checkpoint(name)
    (counted,) = decoded(path, "EP1DP1", [random_prompt(5)])
    formula = estimate(path, 1)
    assert counted["shared"] > 0
    assert (formula.shared_read_bytes() == counted["shared"]) == (name == "T-DS3")
    assert name == "T-DS3" or formula.shared_read_bytes() == 0


def test_shared_experts_of_idle_ranks_are_not_read() -> None:
    """The formula charges them for every step of an engine; a rank without tokens has nothing to run through them."""
    path = checkpoint("T-DS3")
    counted, formula = decoded(path, "EP2DP1", [random_prompt(5)]), estimate(path, 2)
    assert [rank["shared"] for rank in counted] == [formula.shared_read_bytes(), 0]


@needs_native
def test_scales_and_starts_of_int4_are_left_out() -> None:
    path = checkpoint("T-QW3", hidden_size=64, moe_intermediate_size=64)
    (counted,) = decoded(path, "EP1DP1", [random_prompt(5)], dtype="bfloat16", quantization="int4")
    assert counted["routed"] > 1.1 * estimate(path, 1, bytes_a_weight=0.5).routed_read_bytes(T=1)
