"""Sampling on real models: the same tokens in any company and after preemption, and reports on prompts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from moewe.runtime.params import SamplingParams, StructuredSpec
from moewe.runtime.plan import unpack
from moewe.runtime.ranks.masks import pack_mask
from tests.support.comparison import compare_with_reference
from tests.support.fixtures import checkpoint, random_prompt, reference_logits
from tests.support.harness import Group, Outcome, generate
from tests.support.numerics import LOGITS_AGAINST_REFERENCE, LOGPROBS
from tests.support.setups import Setup

MODEL = "T-QW3"
# Everything at once: each of these changes tokens, as `test_every_wish_changes_tokens` shows.
WISHES = {
    "min_p": {"min_p": 0.4},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "repetition_penalty": {"repetition_penalty": 3.0},
    "logit_bias": {"logit_bias": {7: 3.0, 11: -100.0, 30: 2.5}},
    "top_k": {"top_k": 3},
}


def seeded(seed: int, **changes: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "temperature": 0.8, "seed": seed, "ignore_eos": True, **changes})


def mixed(seed: int) -> SamplingParams:
    """Return wishes that differ from seed to seed."""
    chance = np.random.default_rng(seed)
    chosen = [wish for wish in WISHES.values() if chance.random() < 0.4]
    words = [tuple(chance.integers(0, 40, size).tolist()) for size in (1, 1, 2)]
    changes = {"bad_word_tokens": tuple(words), "min_tokens": int(chance.integers(0, 9)), "stop_token_ids": (3, 9)}
    return seeded(seed, **{name: value for wish in chosen for name, value in wish.items()} | changes)


def test_every_wish_changes_tokens() -> None:
    prompt = random_prompt(11)
    plain, *others = generate(
        checkpoint(MODEL), [prompt] * (1 + len(WISHES)), params=[seeded(5), *[seeded(5, **w) for w in WISHES.values()]]
    ).outcomes
    for name, other in zip(WISHES, others, strict=True):
        assert other.tokens != plain.tokens, name
    word = (plain.tokens[4], plain.tokens[5])
    (banned,) = generate(checkpoint(MODEL), [prompt], params=seeded(5, bad_word_tokens=(word,))).outcomes
    assert banned.tokens[:5] == plain.tokens[:5] and word not in pairwise(banned.tokens)


# --- P-API-03 ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("topology", ["EP1DP1", "EP2DP1", "EP1DP2"])
def test_all_wishes_give_the_same_tokens_alone_and_in_a_batch_of_32(topology: str) -> None:
    path, setup = checkpoint(MODEL), Setup(topology=topology, keep_logits=False, max_num_seqs=32)
    prompts = [random_prompt(3 + i % 9, seed=i) for i in range(32)]
    params = [mixed(i) for i in range(32)]
    together = generate(path, prompts, setup=setup, params=params).outcomes
    for i in (0, 5, 17, 31):
        alone = generate(path, [prompts[i]], setup=Setup(keep_logits=False), params=params[i]).outcomes[0]
        assert (alone.tokens, alone.finish_reason) == (together[i].tokens, together[i].finish_reason)
    assert {outcome.finish_reason for outcome in together} == {"stop", "length"}


def test_all_wishes_survive_preemption() -> None:
    path, prompts = checkpoint(MODEL), [random_prompt(20, seed=i) for i in range(6)]
    params = [mixed(i) for i in range(6)]
    ample = generate(path, prompts, params=params)
    tight = generate(path, prompts, setup=Setup(num_blocks=26, block_size=2), params=params)
    assert tight.num_preemptions > 0 == ample.num_preemptions
    assert [outcome.tokens for outcome in tight.outcomes] == [outcome.tokens for outcome in ample.outcomes]


@pytest.mark.parametrize("min_tokens", [0, 3, 10])
def test_ends_do_not_come_before_min_tokens(min_tokens: int) -> None:
    path, prompts = checkpoint(MODEL), [random_prompt(5, seed=i) for i in range(8)]
    ends = {"ignore_eos": False, "stop_token_ids": tuple(range(0, 512, 3)), "min_tokens": min_tokens}
    run = generate(path, prompts, params=[seeded(i, **ends) for i in range(8)])
    for outcome in run.outcomes:
        assert outcome.finish_reason == "stop" and len(outcome.tokens) > min_tokens
        assert [token % 3 == 0 for token in outcome.tokens] == [False] * (len(outcome.tokens) - 1) + [True]


# --- masks, P-API-02 --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("topology", ["EP1DP1", "EP2DP1"])
def test_masks_leave_what_they_allow_and_others_run_as_ever(topology: str) -> None:
    path, prompts = checkpoint(MODEL), [random_prompt(6 + i, seed=i) for i in range(3)]
    alone = generate(path, prompts, params=seeded(3, logprobs=5)).outcomes
    with Group(path, Setup(topology=topology)) as group:
        for i, prompt in enumerate(prompts):
            structured = StructuredSpec(kind="json_object") if i == 1 else None  # its masks are made below
            group.submit(str(i), prompt, seeded(3, logprobs=5, max_tokens=24, structured=structured))
        request, given = group.request("1"), 0
        while group.step():
            if request.awaits_mask and given == len(request.generated) < 24:
                allowed = np.zeros(group.model.vocab_size, np.bool_)
                allowed[[given] if given % 2 else range(100 + given, 110 + given)] = True
                group.scheduler.release("1", pack_mask(allowed))
                given += 1
        outcomes = [group.outcomes[str(i)] for i in range(3)]
    assert [outcomes[0].tokens, outcomes[2].tokens] == [alone[0].tokens, alone[2].tokens]
    for place, token in enumerate(outcomes[1].tokens):
        assert token == place if place % 2 else 100 + place <= token < 110 + place
    for entry in outcomes[1].logprobs:
        assert np.isfinite(entry.logprobs).all() and len(entry.token_ids) == 6
        assert entry.logprobs[1] >= entry.logprobs[0], "the model's own view, whatever the mask"
    assert len(outcomes[1].tokens) == 24


# --- P-API-16 ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 0])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    (outcome,) = generate(
        checkpoint(MODEL), [random_prompt(9)], params=seeded(1, temperature=temperature, top_p=1e-4)
    ).outcomes
    compare_with_reference(checkpoint(MODEL), outcome)


# --- P-API-01 ---------------------------------------------------------------------------------------------------------
def reported(outcome: Outcome) -> tuple[list[int], torch.Tensor, list[list[int]]]:
    """Return places, log-probabilities of the prompt's own tokens, and all ids at each place, own first."""
    places, values, ids = [], [], []
    for piece in outcome.prompt_logprobs:
        num = len(unpack(piece.ranks))
        places += range(piece.start, piece.start + num)
        values += unpack(piece.logprobs, "<f4").reshape(num, -1)[:, 0].tolist()
        ids += unpack(piece.token_ids).reshape(num, -1).tolist()
    return places, torch.tensor(values), ids


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_prompt_is_judged_as_by_the_reference(max_tokens: int) -> None:
    path, prompt = checkpoint(MODEL), [5, 9, 7, 3]
    params = seeded(0, max_tokens=max_tokens, prompt_logprobs=1, logprobs=1)
    for topology in ("EP1DP1", "EP2DP1"):
        (outcome,) = generate(path, [prompt], params=params, setup=Setup(topology=topology)).outcomes
        assert (len(outcome.tokens), len(outcome.logprobs)) == (max_tokens, max_tokens)
        assert outcome.finish_reason == "length"
        places, values, ids = reported(outcome)
        wanted = reference_logits(path, prompt).log_softmax(-1)[:-1]
        assert places == [1, 2, 3]
        assert [own for own, *_ in ids] == prompt[1:]
        assert [best for _, best in ids] == wanted.argmax(-1).tolist()
        own = wanted.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert float((values - own).abs().max()) < LOGITS_AGAINST_REFERENCE


@pytest.mark.parametrize("chunk", [None, 1, 7, 300])
def test_each_place_of_a_prompt_is_reported_once_however_it_runs(chunk: int | None) -> None:
    """Longer than the rows whose logits exist at once; beside prompts that do not ask."""
    path, prompt = checkpoint(MODEL), random_prompt(300 if chunk != 1 else 20, seed=3)
    setup = Setup(max_chunk_tokens=chunk, max_num_batched_tokens=400)
    params = [seeded(0, prompt_logprobs=0, max_tokens=2), seeded(1), seeded(2, prompt_logprobs=3, max_tokens=0)]
    outcomes = generate(path, [prompt, random_prompt(9), prompt[:2]], params=params, setup=setup).outcomes
    places, values, ids = reported(outcomes[0])
    assert places == list(range(1, len(prompt)))
    assert ids == [[token] for token in prompt[1:]]
    logits = outcomes[0].logits_of_all()[: len(prompt) - 1]
    own = logits.log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert float((values - own).abs().max()) < LOGPROBS
    assert outcomes[1].prompt_logprobs == []
    assert reported(outcomes[2])[0] == [1] and len(reported(outcomes[2])[2][0]) == 4


def test_a_preempted_prompt_does_not_report_twice() -> None:
    path, prompts = checkpoint(MODEL), [random_prompt(30, seed=i) for i in range(5)]
    params = [seeded(i, prompt_logprobs=2, max_tokens=30) for i in range(5)]
    setup = Setup(num_blocks=45, block_size=2, max_chunk_tokens=8)
    run = generate(path, prompts, params=params, setup=setup)
    assert run.num_preemptions > 0
    for prompt, outcome in zip(prompts, run.outcomes, strict=True):
        assert reported(outcome)[0] == list(range(1, len(prompt)))
        assert len(outcome.tokens) == 30


def test_a_prompt_of_one_token_and_no_output_is_only_run() -> None:
    (outcome,) = generate(checkpoint(MODEL), [[5]], params=seeded(0, max_tokens=0, prompt_logprobs=1)).outcomes
    assert (outcome.tokens, outcome.prompt_logprobs, outcome.finish_reason) == ([], [], "length")
