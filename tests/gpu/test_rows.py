"""Kernels over rows of logits: tokens by chance against the plain sampler, the others against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moewe.runtime.ranks import logprobs, row_scan, sampler, sampler_reference
from moewe.runtime.ranks.kernels import rows as kernels
from moewe.runtime.ranks.kernels.rows import triton_draw, triton_logprobs, triton_scan
from moewe.runtime.ranks.randomness import uniform
from moewe.runtime.ranks.sampler import SamplingRows
from tests.support.numerics import LOGPROBS, PROBABILITIES, assert_same, assert_within
from tests.support.poisoned import assert_untouched

SETTINGS = {
    "plain": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "both": {"temperature": 1.3, "top_k": 12, "top_p": 0.6},
    "one": {"top_p": 1e-4},
    "none": {"top_p": 0.0},
    "wide_k": {"top_k": 10_000},
    "min_p": {"min_p": 0.07},
    "every": {"temperature": 1.2, "min_p": 0.02, "top_k": 9, "top_p": 0.8},
    "best": {"min_p": 1.0},
}


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks in a row of a few numbers."""
    monkeypatch.setattr(kernels, "_WIDEST_BLOCK", 16)
    monkeypatch.setattr(kernels, "_WIDEST_DRAW_BLOCK", 16)


def settings_of(num: int, names: list[str]) -> SamplingRows:
    def column(field: str, default: float, dtype: type) -> np.ndarray:
        return np.array([SETTINGS[names[i % len(names)]].get(field, default) for i in range(num)], dtype)

    return SamplingRows(
        greedy=np.zeros(num, bool),
        temperature=column("temperature", 1.0, np.float64),
        top_p=column("top_p", 1.0, np.float64),
        top_k=column("top_k", 0, np.int64),
        min_p=column("min_p", 0.0, np.float64),
        seed=np.arange(num, dtype=np.uint64),
        position=np.arange(num),
    )


@pytest.mark.parametrize(
    ("vocab", "levels", "rows", "names"),
    [
        (12, None, 1, ["every"]),
        pytest.param(37, None, 20, list(SETTINGS), marks=pytest.mark.slow),
        pytest.param(33, 1, 20, list(SETTINGS), marks=pytest.mark.slow),  # most weights are tied
        pytest.param(1, None, 10, list(SETTINGS), marks=pytest.mark.slow),
    ],
)
def test_a_draw_is_the_inverse_of_the_reference_distribution(narrow, vocab, levels, rows, names) -> None:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    logits = logits if levels is None else (logits * levels).round() / levels
    logits[::2, vocab // 2 + 1 :] = -torch.inf  # forbidden tokens
    settings = settings_of(rows, names)
    tokens = assert_untouched(lambda given: triton_draw(given, settings), logits).tolist()
    chances = uniform(settings.seed, settings.position)
    for row, token in enumerate(tokens):
        wanted = sampler_reference.distribution(
            logits[row].numpy(), settings.temperature[row], int(settings.top_k[row]), max(settings.top_p[row], 1e-9),
            settings.min_p[row],
        )  # fmt: skip
        assert wanted[token] > 0
        near = np.abs(np.cumsum(wanted) - chances[row]).min() < PROBABILITIES
        assert token == sampler_reference.choose(wanted, chances[row]) or near, (row, names[row % len(names)])


@pytest.mark.slow
def test_tied_tokens_are_kept_in_id_order(narrow) -> None:
    rows = settings_of(4, ["both"])
    rows.top_k[:], rows.top_p[:], rows.min_p[:] = 6, 0.5, 0.0  # half of six
    rows.seed[:], rows.position[:] = 3, np.arange(4)
    assert set(triton_draw(torch.zeros(4, 20), rows).tolist()) <= {0, 1, 2}


@pytest.mark.slow
def test_a_row_gets_the_same_token_alone(narrow) -> None:
    logits, rows = torch.randn(2, 20), settings_of(2, ["top_k"])
    together = triton_draw(logits, rows)
    assert triton_draw(logits[1:], rows.take(np.array([1]))).item() == together[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_first_of_the_best_and_what_is_not_finite(narrow, dtype: torch.dtype) -> None:
    values = (torch.randn(5, 50) * 2).round().to(dtype)  # many are tied
    values[1, 40], values[2, 3], values[3] = torch.nan, -torch.inf, -7.0
    best, finite = triton_scan(values)
    assert finite.dtype == torch.bool and finite.tolist() == [True, False, False, True, True]
    assert best[finite].tolist() == values[finite].float().argmax(-1).tolist() and best[3] == 0


def test_log_probabilities_and_ranks_of_tokens(narrow) -> None:
    logits = torch.randn(4, 50) * 5
    logits[1, 20:], logits[2] = -torch.inf, 1.0
    row_ids, tokens = torch.tensor([3, 0, 1, 1, 2]), torch.tensor([49, 7, 3, 30, 5])
    chosen, ranks = triton_logprobs(logits, row_ids, tokens, -9999.0)
    rows = logits[row_ids]
    expected = rows.log_softmax(-1).clamp(min=-9999.0).gather(1, tokens[:, None])[:, 0]
    assert_within(chosen, expected, LOGPROBS)
    assert_same(ranks, (rows >= rows.gather(1, tokens[:, None])).sum(-1))


def test_logits_on_a_gpu_go_to_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, rows = torch.randn(2, 12), settings_of(2, ["plain"])
    rows.greedy[0] = True
    expected = [int(logits[0].argmax()), triton_draw(logits, rows)[1].item()]
    for module in (row_scan, sampler):
        monkeypatch.setattr(module, "on_gpu", lambda values: True)
    monkeypatch.setattr(row_scan, "_is_native", lambda values: False)
    assert sampler.sample(logits, rows).tolist() == expected
    best, finite = row_scan.RowScanner()(logits)
    assert best.tolist() == logits.argmax(-1).tolist() and finite.all() and row_scan.finite_rows(logits).all()


@pytest.mark.parametrize("num_top", [0, 3])
def test_log_probabilities_on_a_gpu_go_to_the_kernel(monkeypatch: pytest.MonkeyPatch, num_top: int) -> None:
    logits, tokens, rows = torch.randn(3, 12), torch.tensor([4, 11]), np.array([2, 0])
    expected = logprobs.token_logprobs(logits, tokens, num_top, rows)
    monkeypatch.setattr(logprobs, "on_gpu", lambda values: True)
    found = logprobs.token_logprobs(logits, tokens, num_top, rows)
    for name, values in vars(expected).items():
        ours, theirs = (torch.from_numpy(array).double() for array in (getattr(found, name), values))
        assert_within(ours, theirs, LOGPROBS)
