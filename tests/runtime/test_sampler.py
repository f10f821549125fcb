"""The vectorised sampler against the plain one: exact filters, distributions, ties, and independence of batch mates."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from moewe.native.library import load
from moewe.runtime.ranks import sampler, sampler_reference
from moewe.runtime.ranks.randomness import uniform
from moewe.runtime.ranks.sampler import SamplingRows, sample
from moewe.runtime.ranks.sampling_state import GREEDY_TEMPERATURE
from tests.support.numerics import PROBABILITIES


@pytest.fixture(params=["native", "torch"], autouse=True)
def path(request, monkeypatch):
    """Every test of a choice runs twice: drawn natively, and drawn with torch."""
    if request.param == "torch":
        monkeypatch.setattr(sampler, "can_draw_natively", lambda logits: False)
    elif load() is None:
        pytest.skip("no native kernels here")


def make_rows(num, *, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=None, position=None):
    return SamplingRows(
        greedy=np.full(num, temperature < GREEDY_TEMPERATURE or top_k == 1),
        temperature=np.full(num, temperature, np.float64),
        top_p=np.full(num, top_p, np.float64),
        top_k=np.full(num, top_k, np.int64),
        min_p=np.full(num, min_p, np.float64),
        seed=np.arange(num, dtype=np.uint64) if seed is None else np.full(num, seed, np.uint64),
        position=np.arange(num) if position is None else np.asarray(position, np.int64),
    )


def join(parts):
    names = ("greedy", "temperature", "top_p", "top_k", "min_p", "seed", "position")
    return SamplingRows(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def random_logits(num, vocab, *, seed=0, scale=3.0, levels=None):
    values = torch.randn(num, vocab, generator=torch.Generator().manual_seed(seed)) * scale
    return values if levels is None else (values * levels).round() / levels


def weights_of(logits):
    return (logits - logits.amax(-1, keepdim=True)).exp()


SETTINGS = {
    "plain": {},
    "warm": {"temperature": 0.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "both": {"temperature": 1.3, "top_k": 12, "top_p": 0.6},
    "one": {"top_p": 1e-4},
    "wide_k": {"top_k": 10_000},
    "min_p": {"min_p": 0.07},
    "every": {"temperature": 1.2, "min_p": 0.02, "top_k": 9, "top_p": 0.8},
    "best": {"min_p": 1.0},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_distribution_equals_reference(name):
    setting = SETTINGS[name]
    logits = random_logits(1, 24, seed=3)
    num = 20_000
    tokens = sample(logits.expand(num, -1), make_rows(num, **setting)).numpy()
    wanted = sampler_reference.distribution(
        logits[0].numpy(),
        setting.get("temperature", 1.0),
        setting.get("top_k", 0),
        setting.get("top_p", 1.0),
        setting.get("min_p", 0.0),
    )
    seen = np.bincount(tokens, minlength=24)
    assert not seen[wanted == 0].any()
    common = wanted * num >= 5
    observed = np.append(seen[common], seen[~common].sum())
    expected = np.append(wanted[common], wanted[~common].sum()) * num
    observed, expected = observed[expected > 0], expected[expected > 0]
    if observed.size > 1:
        assert stats.chisquare(observed, expected).pvalue > 1e-3
    else:
        assert observed[0] == num


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.integers(1, 60),
    levels=st.sampled_from([None, 1, 4]),
    temperature=st.sampled_from([0.05, 0.5, 1.0, 2.0]),
    top_k=st.integers(-1, 70),
    top_p=st.sampled_from([1e-6, 0.1, 0.37, 0.5, 0.9, 0.999, 1.0]),
    candidates=st.sampled_from([1, 4, 1024]),
)
def test_filters_keep_exactly_the_reference_set(seed, vocab, levels, temperature, top_k, top_p, candidates):
    logits = random_logits(3, vocab, seed=seed, levels=levels)
    scaled = weights_of(logits / temperature)
    limit = np.full(3, top_k if 0 < top_k < vocab else vocab)
    before, sampler._NUM_CANDIDATES = sampler._NUM_CANDIDATES, candidates
    try:
        kept = sampler._filter(scaled, limit, np.full(3, top_p), torch.from_numpy) > 0
    finally:
        sampler._NUM_CANDIDATES = before
    for row in range(3):
        wanted = sampler_reference.distribution(logits[row].numpy() / np.float32(temperature), 1.0, top_k, top_p) > 0
        differ = np.flatnonzero(kept[row].numpy() != wanted)
        # Float32 weights may cross the boundary of the nucleus only where the reference stands on it.
        assert differ.size == 0 or on_boundary(scaled[row].double().numpy(), int(wanted.sum()), top_p, limit[row])


def on_boundary(weights, num_kept, top_p, top_k):
    order = np.sort(weights)[::-1][:top_k]
    cumulative = np.cumsum(order) / order.sum()
    return np.abs(cumulative[max(0, num_kept - 2) : num_kept + 1] - top_p).min() < PROBABILITIES


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10_000), vocab=st.integers(2, 50), name=st.sampled_from(list(SETTINGS)))
def test_draw_is_the_inverse_of_the_reference_distribution(seed, vocab, name):
    setting = SETTINGS[name]
    logits, rows = random_logits(4, vocab, seed=seed), make_rows(4, seed=seed, **setting)
    tokens = sample(logits, rows).tolist()
    chances = uniform(rows.seed, rows.position)
    for row, token in enumerate(tokens):
        wanted = sampler_reference.distribution(
            logits[row].numpy(),
            setting.get("temperature", 1.0),
            setting.get("top_k", 0),
            setting.get("top_p", 1.0),
            setting.get("min_p", 0.0),
        )
        cumulative = np.cumsum(wanted)
        near = np.abs(cumulative - chances[row]).min() < PROBABILITIES
        assert token == sampler_reference.choose(wanted, chances[row]) or near


def test_tied_tokens_are_kept_in_id_order():
    logits = torch.zeros(200, 8)
    assert set(sample(logits, make_rows(200, top_p=0.5)).tolist()) == {0, 1, 2, 3}
    assert set(sample(logits, make_rows(200, top_k=3)).tolist()) == {0, 1, 2}


def test_a_row_gets_the_same_token_in_any_batch():
    parts = [make_rows(1, seed=7 + i, position=[20], **setting) for i, setting in enumerate(SETTINGS.values())]
    parts.append(make_rows(1, temperature=0.0))
    logits = random_logits(len(parts), 3000, seed=1, scale=1.0)
    together = sample(logits, join(parts)).tolist()
    order = torch.randperm(len(parts), generator=torch.Generator().manual_seed(0))
    shuffled = sample(logits[order], join([parts[i] for i in order])).tolist()
    for row, part in enumerate(parts):
        assert sample(logits[row : row + 1], part).item() == together[row]
        assert shuffled[order.tolist().index(row)] == together[row]


def test_a_nucleus_wider_than_the_candidates_is_exact():
    logits = random_logits(2, 5000, scale=0.01)
    shares, limits = np.array([0.9, 0.5]), np.full(2, 5000)
    kept = sampler._filter(weights_of(logits), limits, shares, torch.from_numpy).gt(0).sum(-1).tolist()
    for row, top_p in enumerate((0.9, 0.5)):
        wanted = (sampler_reference.distribution(logits[row].numpy(), 1.0, 0, top_p) > 0).sum()
        assert abs(kept[row] - wanted) <= 1


@pytest.mark.parametrize("temperature", [0, 1e-6, 1e-5, 1e-4, 1e-3])
def test_tiny_temperatures_equal_greedy(temperature):
    logits = random_logits(16, 500).half().float() * 60
    tokens = sample(logits, make_rows(16, temperature=temperature, top_p=1e-4))
    assert tokens.tolist() == logits.argmax(-1).tolist()


def test_greedy_ties_go_to_the_lower_id():
    logits = torch.zeros(3, 40)
    logits[1, [30, 9]] = 2.0
    logits[2, 39] = 1.0
    assert sample(logits, make_rows(3, temperature=0)).tolist() == [0, 9, 39]
    assert sample(logits, make_rows(3, top_k=1)).tolist() == [0, 9, 39]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 900), st.floats(0, 1, exclude_max=True))
def test_inverting_never_yields_a_token_of_no_weight(seed, vocab, chance):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(4, vocab, generator=generator) * (torch.rand(4, vocab, generator=generator) < 0.1)
    weights[torch.arange(4), torch.randint(vocab, (4,), generator=generator)] = 1.0
    chances = torch.tensor([chance, 0.0, 1 - 2.0**-53, 0.5], dtype=torch.float64)
    tokens = sampler._invert(weights, chances)
    assert (weights[torch.arange(4), tokens] > 0).all()
    for row, token in enumerate(tokens.tolist()):
        share = (weights[row].double().cumsum(0) / weights[row].double().sum()).numpy()
        assert share[token] >= chances[row] - 1e-12
        assert token == 0 or share[token - 1] <= chances[row] + 1e-12
