"""What requests do to logits, against the plain sampler: bias, penalties, bans and masks, as a batch lives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from moewe.runtime.plan import Admission, SamplingState, TokenMask, pack
from moewe.runtime.ranks import sampler_reference
from moewe.runtime.ranks.logit_edits import LogitEdits, edited
from moewe.runtime.ranks.masks import masked_rows, pack_mask
from moewe.runtime.ranks.sampler import SamplingRows, sample
from moewe.runtime.ranks.sampler_reference import Wishes
from moewe.runtime.ranks.sampling_state import SlotSampling
from tests.support.numerics import EDITED_LOGITS

VOCAB = 40
PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 0, "num_logprobs": -1, "eos_token_ids": ()}


def admit(state: SlotSampling, slot: int, wishes: Wishes) -> None:
    """Let a sequence in as `wishes` say, with the tokens that they have."""
    sampling = SamplingState(
        **{**PLAIN, "eos_token_ids": tuple(wishes.ends)},
        min_tokens=wishes.min_tokens,
        presence_penalty=wishes.presence_penalty,
        frequency_penalty=wishes.frequency_penalty,
        repetition_penalty=wishes.repetition_penalty,
        logit_bias=dict(wishes.logit_bias),
        bad_words=tuple(tuple(word) for word in wishes.bad_words),
    )
    tokens = pack(np.array([*wishes.prompt, *wishes.output]))
    state.admit(
        Admission(
            slot=slot, sequence_id=slot, tokens=tokens, max_length=500, sampling=sampling,
            num_prompt_tokens=len(wishes.prompt),
        )
    )  # fmt: skip


def with_output(wishes: Wishes, output: list[int]) -> Wishes:
    return Wishes(**{**{name: getattr(wishes, name) for name in wishes.__dataclass_fields__}, "output": output})


def positions_of(wishes: list[Wishes]) -> np.ndarray:
    return np.array([len(own.prompt) + len(own.output) for own in wishes])


def compare(state: SlotSampling, slots: list[int], wishes: list[Wishes], logits: torch.Tensor) -> None:
    """Assert that the edits of `slots` are what the reference makes of `wishes`."""
    found = state.edits(np.array(slots), positions_of(wishes))
    masks = [
        TokenMask(slot=slot, words=pack_mask(np.isin(np.arange(VOCAB), list(own.allowed))))
        for slot, own in zip(slots, wishes, strict=True)
        if own.allowed is not None
    ]
    if masks:
        found = found or LogitEdits()
        found.add_masks(masks, np.array(slots), VOCAB)
    before = logits.clone()
    scores = logits if found is None else edited(logits, found)
    assert torch.equal(logits, before), "the model's logits are reported, so they stay"
    for row, own in enumerate(wishes):
        wanted = sampler_reference.scores(logits[row].numpy(), own)
        assert np.allclose(scores[row].numpy(), wanted, atol=EDITED_LOGITS, rtol=0), own


TOKENS = st.integers(0, VOCAB - 1)
WISHES = st.builds(
    Wishes,
    prompt=st.lists(TOKENS, min_size=1, max_size=12),
    output=st.lists(TOKENS, max_size=12),
    logit_bias=st.dictionaries(TOKENS, st.floats(-100, 100), max_size=4),
    presence_penalty=st.sampled_from([0.0, 1.0, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -1.5]),
    repetition_penalty=st.sampled_from([1.0, 2.0, 0.5]),
    bad_words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=4),
    ends=st.lists(TOKENS, max_size=3),
    min_tokens=st.integers(0, 8),
    allowed=st.none() | st.frozensets(TOKENS, min_size=1, max_size=10),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(WISHES, min_size=1, max_size=5), st.integers(0, 10_000))
def test_edits_equal_the_reference(wishes: list[Wishes], seed: int) -> None:
    state = SlotSampling(8)
    slots = np.random.default_rng(seed).permutation(8)[: len(wishes)].tolist()
    for slot, own in zip(slots, wishes, strict=True):
        admit(state, slot, own)
    logits = torch.randn(len(wishes), VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    compare(state, slots, wishes, logits)


@settings(max_examples=30, deadline=None)
@given(st.lists(WISHES, min_size=4, max_size=8), st.integers(0, 10_000))
def test_edits_follow_sequences_as_they_grow_leave_and_return(wishes: list[Wishes], seed: int) -> None:
    """Tokens are few, so bad words and repeats are met; one that returns has its output given to it again."""
    chance = np.random.default_rng(seed)
    state, running = SlotSampling(4), dict[int, Wishes]()
    for turn in range(30):
        free = [slot for slot in range(4) if slot not in running]
        if wishes and free and chance.random() < 0.6:
            slot = int(chance.choice(free))
            running[slot] = wishes.pop()
            admit(state, slot, running[slot])
        if running and chance.random() < 0.2:
            slot = int(chance.choice(list(running)))
            state.release(np.array([slot]))
            wishes.insert(0, running.pop(slot))
        slots = [slot for slot in running if chance.random() < 0.8]
        if not slots:
            continue
        logits = torch.randn(len(slots), VOCAB, generator=torch.Generator().manual_seed(seed + turn)) * 4
        compare(state, slots, [running[slot] for slot in slots], logits)
        counts = chance.integers(0, 3, len(slots))
        tokens = np.where(np.arange(2) < counts[:, None], chance.integers(0, 4, (len(slots), 2)), -1)
        state.note(np.array(slots), tokens, counts)
        for slot, own, count in zip(slots, tokens.tolist(), counts.tolist(), strict=True):
            running[slot] = with_output(running[slot], [*running[slot].output, *own[:count]])


def test_scope_of_penalties() -> None:
    """Prompt holds 5 twice, output holds 6: repetition is for both, presence and frequency for the output alone."""
    state = SlotSampling(1)
    wishes = Wishes(prompt=[5, 5, 1], output=[6], repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5)
    admit(state, 0, wishes)
    logits = torch.zeros(1, 10)
    logits[0, :8] = torch.tensor([0.0, -1.0, 2.0, -2.0, 1.0, 4.0, 3.0, 1.0])
    found = edited(logits, state.edits(np.array([0]), positions_of([wishes])))
    assert found[0, :8].tolist() == [0.0, -2.0, 2.0, -2.0, 1.0, 2.0, 0.0, 1.0]


def test_repetition_equals_transformers() -> None:
    processor = pytest.importorskip("transformers").RepetitionPenaltyLogitsProcessor(penalty=1.7)
    wishes = Wishes(prompt=[3, 9, 9], output=[4, 3, 3], repetition_penalty=1.7)
    state = SlotSampling(1)
    admit(state, 0, wishes)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(5))
    wanted = processor(torch.tensor([[*wishes.prompt, *wishes.output]]), logits.clone())
    assert torch.allclose(edited(logits, state.edits(np.array([0]), positions_of([wishes]))), wanted)


def test_nobody_asks_and_nothing_is_made() -> None:
    state = SlotSampling(4)
    admit(state, 2, Wishes(prompt=[1, 2], ends=[7]))
    assert state.edits(np.array([2, 1]), np.array([2, 5])) is None
    admit(state, 1, Wishes(prompt=[1, 2], logit_bias={3: 1.0}))
    assert state.edits(np.array([2]), np.array([2])) is None, "only those who sample are asked"
    assert state.edits(np.array([1, 2]), np.array([2, 2])) is not None
    state.release(np.array([1]))
    admit(state, 1, Wishes(prompt=[1, 2]))
    assert state.edits(np.array([1, 2]), np.array([2, 2])) is None


def test_ids_beyond_the_vocabulary_change_nothing() -> None:
    """The door refuses them; a worker that meets one all the same goes on."""
    state = SlotSampling(1)
    wishes = Wishes(prompt=[1], logit_bias={VOCAB: 5.0, 2: 1.0}, ends=[VOCAB + 3], min_tokens=2, bad_words=[[VOCAB]])
    admit(state, 0, wishes)
    logits = torch.zeros(1, VOCAB)
    assert edited(logits, state.edits(np.array([0]), np.array([1]))).nonzero().tolist() == [[0, 2]]


def test_logits_stay_finite() -> None:
    state = SlotSampling(1)
    admit(state, 0, Wishes(prompt=[1, 2], repetition_penalty=0.01, logit_bias={3: 100.0}))
    logits = torch.full((1, VOCAB), 3e38)
    logits[0, 2] = -3e38
    assert torch.isfinite(edited(logits, state.edits(np.array([0]), np.array([2])))).all()


def test_a_mask_for_another_vocabulary_is_a_mistake_and_one_for_who_left_is_none() -> None:
    mask = TokenMask(slot=3, words=pack_mask(np.ones(33, bool)))
    with pytest.raises(RuntimeError, match="slot 3 has 8 bytes, but 32 tokens take 4"):
        masked_rows([mask], np.array([3]), 32)
    rows, words = masked_rows([mask], np.array([1, 2]), 33)
    assert rows.size == 0 and words.shape == (0, 2)


CASES = {
    "penalties": Wishes(prompt=[1, 2, 3], output=[4, 4, 5], repetition_penalty=1.4, presence_penalty=0.5,
                        frequency_penalty=0.3),
    "bias": Wishes(prompt=[1], logit_bias={0: 2.0, 7: -100.0}),
    "bad words": Wishes(prompt=[1], output=[4, 6], bad_words=[[2], [4, 6, 9], [6, 5, 1]]),
    "too early to end": Wishes(prompt=[1], output=[4], ends=[0, 3], min_tokens=2),
    "mask": Wishes(prompt=[1], allowed=frozenset([2, 9, 11, 15])),
    "all": Wishes(prompt=[1, 2], output=[4], repetition_penalty=1.2, logit_bias={9: 1.0}, ends=[11], min_tokens=3,
                  bad_words=[[4, 15]], allowed=frozenset([2, 4, 9, 11, 15, 17])),
}  # fmt: skip
FILTERS = {"none": {}, "min_p": {"min_p": 0.1}, "all": {"temperature": 0.8, "min_p": 0.02, "top_k": 9, "top_p": 0.9}}


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("name", CASES)
def test_tokens_come_as_often_as_the_reference_says(name: str, filters: str) -> None:
    wishes, setting, num, vocab = CASES[name], FILTERS[filters], 20_000, 20
    state = SlotSampling(1)
    admit(state, 0, wishes)
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(11)) * 1.5
    edits = state.edits(np.array([0]), positions_of([wishes])) or LogitEdits()
    if wishes.allowed is not None:
        words = pack_mask(np.isin(np.arange(vocab), list(wishes.allowed)))
        edits.add_masks([TokenMask(slot=0, words=words)], np.array([0]), vocab)
    rows = SamplingRows(
        greedy=np.zeros(num, bool),
        temperature=np.full(num, setting.get("temperature", 1.0)),
        top_p=np.full(num, setting.get("top_p", 1.0)),
        top_k=np.full(num, setting.get("top_k", 0)),
        min_p=np.full(num, setting.get("min_p", 0.0)),
        seed=np.arange(num, dtype=np.uint64),
        position=np.full(num, 77),
    )
    seen = np.bincount(sample(edited(logits, edits).expand(num, -1), rows).numpy(), minlength=vocab)
    wanted = sampler_reference.distribution(
        sampler_reference.scores(logits[0].numpy(), wishes), setting.get("temperature", 1.0), setting.get("top_k", 0),
        setting.get("top_p", 1.0), setting.get("min_p", 0.0),
    )  # fmt: skip
    assert not seen[wanted == 0].any()
    expected = wanted[wanted > 0] * num
    assert expected.size > 1
    common = expected >= 5
    observed = seen[wanted > 0]
    rest = observed[~common].sum(), expected[~common].sum()
    if rest[1]:
        observed, expected = np.append(observed[common], rest[0]), np.append(expected[common], rest[1])
    assert stats.chisquare(observed, expected).pvalue > 1e-3
