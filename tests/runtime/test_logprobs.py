"""Log-probabilities, ranks and the most likely tokens: against the plain reference, natively and with torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moewe.native.library import load
from moewe.runtime.ranks import logprobs, sampler_reference
from moewe.runtime.ranks.logprobs import LEAST_LOGPROB, RowLogprobs, token_logprobs
from tests.support.native import needs_native, team_of
from tests.support.numerics import LOGPROBS


@pytest.fixture(params=["native", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(logprobs, "load", lambda: None)
    elif load() is None:
        pytest.skip("no native kernels here")


def random_logits(num: int, vocab: int, *, seed: int = 0, levels: int | None = None) -> torch.Tensor:
    """`levels`: so many different numbers, so that many of them tie."""
    generator = torch.Generator().manual_seed(seed)
    if levels is not None:
        return torch.randint(levels, (num, vocab), generator=generator).float()
    return torch.randn(num, vocab, generator=generator) * 3


def tokens_of(num: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(vocab, (num,), generator=torch.Generator().manual_seed(seed))


def assert_identical(actual: RowLogprobs, expected: RowLogprobs, rows: slice | list[int] = slice(None)) -> None:
    for name in ("chosen", "rank", "top_ids", "top"):
        mine, other = getattr(actual, name), getattr(expected, name)[rows]
        assert mine.dtype == other.dtype and mine.tobytes() == other.tobytes(), name


def check(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> None:
    result = token_logprobs(logits, tokens, num_top)
    assert result.chosen.dtype == result.top.dtype == np.float32
    for row in range(len(tokens)):
        chosen, rank, top = sampler_reference.logprobs(logits[row].numpy(), int(tokens[row]), num_top)
        assert abs(result.chosen[row] - max(chosen, LEAST_LOGPROB)) < LOGPROBS
        assert result.rank[row] == rank
        assert result.top_ids[row].tolist() == [token for token, _ in top]
        assert np.allclose(result.top[row], [max(value, LEAST_LOGPROB) for _, value in top], rtol=0, atol=LOGPROBS)


@pytest.mark.usefixtures("path")
@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 200), st.integers(0, 25), st.sampled_from([None, 1, 3, 40]))
def test_they_equal_the_reference(seed: int, vocab: int, num_top: int, levels: int | None) -> None:
    check(random_logits(3, vocab, seed=seed, levels=levels), tokens_of(3, vocab, seed), num_top)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("vocab", [1023, 1024, 1025, 151_936])
def test_large_vocabularies_equal_the_reference(vocab: int) -> None:
    rising = torch.linspace(-20, 20, vocab)[None]  # every number is larger than all before it
    for logits in (random_logits(1, vocab), rising, rising.flip(-1), torch.zeros(1, vocab)):
        for token in (0, vocab // 2, vocab - 1):
            check(logits, torch.tensor([token]), 20)


@pytest.mark.usefixtures("path")
def test_forbidden_tokens_are_the_least_likely() -> None:
    logits = torch.full((2, 40), -math.inf)
    logits[:, 7], logits[:, 33] = 1.0, 2.0
    found = token_logprobs(logits, torch.tensor([33, 5]), 4)
    assert found.rank.tolist() == [1, 40]
    assert found.top_ids.tolist() == [[33, 7, 0, 1]] * 2
    assert found.chosen[1] == LEAST_LOGPROB and found.top[0, 2:].tolist() == [LEAST_LOGPROB] * 2


@pytest.mark.usefixtures("path")
def test_they_can_be_said_in_json() -> None:
    logits = torch.zeros(1, 5)
    logits[0, 1], logits[0, 2] = 3e38, -3e38
    found = token_logprobs(logits, torch.tensor([2]), 5)
    assert found.chosen.tolist() == [LEAST_LOGPROB] and np.isfinite(found.top).all()
    assert found.top_ids.tolist() == [[1, 0, 3, 4, 2]] and found.rank.tolist() == [5]


@pytest.mark.usefixtures("path")
def test_answers_name_their_rows() -> None:
    logits, tokens = random_logits(6, 300), tokens_of(4, 300)
    rows = np.array([5, 0, 3, 3])
    assert_identical(token_logprobs(logits, tokens, 3, rows), token_logprobs(logits[rows], tokens, 3))
    none = token_logprobs(logits, tokens[:0], 3, rows[:0])
    assert none.top.shape == (0, 3) and none.rank.shape == (0,)


@needs_native
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), vocab=st.integers(1, 3000), num_top=st.integers(0, 8), more=st.integers(0, 8))
def test_a_row_has_the_same_bits_in_any_company(seed: int, vocab: int, num_top: int, more: int) -> None:
    logits, tokens = random_logits(9, vocab, seed=seed, levels=None if seed % 2 else 50), tokens_of(9, vocab, seed)
    together = token_logprobs(logits, tokens, num_top)
    for row in range(9):
        one = slice(row, row + 1)
        assert_identical(token_logprobs(logits[one].clone(), tokens[one], num_top), together, one)
    with team_of(2):
        assert_identical(token_logprobs(logits, tokens, num_top), together)
    wider = token_logprobs(logits, tokens, num_top + more)  # as a neighbour may ask for
    assert wider.chosen.tobytes() == together.chosen.tobytes() and wider.rank.tobytes() == together.rank.tobytes()
    width = together.top.shape[1]
    assert wider.top[:, :width].tobytes() == together.top.tobytes()
    assert wider.top_ids[:, :width].tobytes() == together.top_ids.tobytes()


def test_rows_full_of_ties_are_not_sorted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of 16 bits tie nearly always, and a prompt has thousands of rows: such sorts once took minutes."""
    widths = []
    plain = torch.Tensor.sort

    def sort(values: torch.Tensor, *arguments: object, **options: object) -> object:
        widths.append(values.shape[-1])
        return plain(values, *arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(logprobs, "load", lambda: None)
    monkeypatch.setattr(torch.Tensor, "sort", sort)
    logits = torch.randint(0, 3, (8, 4096), generator=torch.Generator().manual_seed(5)).float()
    found = token_logprobs(logits, torch.zeros(8, dtype=torch.int64), 20)
    assert max(widths) <= 20
    assert found.top_ids.tolist() == [(row == 2).nonzero()[:20, 0].tolist() for row in logits]
