"""What counts as the same answer: logits within a tolerance, greedy tokens equal, near-ties of the reference excused.

Not running anything: it compares `Outcome`s of tests/support/harness.py with transformers and with each other.
Shapes: logits [T, V] f32 by position; position p predicts token p + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from tests.support.fixtures import half_precision_logits, reference_logits
from tests.support.harness import Outcome
from tests.support.numerics import (
    HALF_PRECISION_FACTOR,
    LOGIT_TIE,
    LOGITS_AGAINST_REFERENCE,
    LOGITS_BETWEEN_RUNS,
    LOGITS_IN_HALF_PRECISION,
)


def compare_with_reference(checkpoint: Path, outcome: Outcome) -> None:
    """Raise AssertionError unless logits at every position and all greedy tokens are those of transformers in fp32.

    The reference reads our own tokens, so one excused step does not spoil those after it.
    """
    assert outcome.finish_reason in ("length", "stop"), (outcome.finish_reason, outcome.error)
    sequence = outcome.prompt + outcome.tokens
    reference = reference_logits(checkpoint, sequence[:-1])
    ours = outcome.logits_of_all()
    difference = (ours - reference).abs()
    worst = float(difference.max())
    assert worst <= LOGITS_AGAINST_REFERENCE, (
        f"logits differ by {worst:.2e} at position {int(difference.amax(-1).argmax())}"
    )
    start = len(outcome.prompt) - 1
    compare_choices(reference[start:], outcome.tokens)


def compare_half_precision(checkpoint: Path, ours: torch.Tensor, prompt: Sequence[int]) -> None:
    """Raise AssertionError unless logits [T, V] in bf16 are near those of fp32 on the same weights.

    Rounding flips an expert here and there, which moves the logits of that token and of those after it by much more
    than a rounding does. So the better half and the better three quarters of the rows are held to the format's
    tolerance, or to a multiple of what transformers itself loses in bf16 where that is more.
    """
    reference = reference_logits(checkpoint, prompt)
    assert ours.shape == reference.shape and ours.isfinite().all()

    def errors(logits: torch.Tensor) -> torch.Tensor:
        return (logits - reference).pow(2).mean(-1).sqrt() / reference.pow(2).mean(-1).sqrt()

    own, theirs = errors(ours), errors(half_precision_logits(checkpoint, prompt))
    for share in (0.5, 0.75):
        a, b = float(own.quantile(share)), float(theirs.quantile(share))
        allowed = max(HALF_PRECISION_FACTOR * b, LOGITS_IN_HALF_PRECISION)
        assert a <= allowed, f"{share:.0%} of the rows are off by up to {a:.1e}, those of transformers by {b:.1e}"


def compare_choices(reference: torch.Tensor, tokens: Sequence[int]) -> None:
    """Raise AssertionError where `tokens` [n] are not the best of `reference` [n, V], near-ties excused."""
    best = reference.topk(2)
    for step, token in enumerate(tokens):
        first, second = best.indices[step].tolist()
        near = float(best.values[step, 0] - best.values[step, 1]) < LOGIT_TIE
        assert token == first or (near and token == second), f"token {step} is {token}, the reference says {first}"


def compare_runs(ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> None:
    """Raise AssertionError unless two runs of the same greedy prompts agree (nothing after an excused token counts)."""
    for number, (left, right) in enumerate(zip(ours, theirs, strict=True)):
        assert (left.prompt, left.finish_reason) == (right.prompt, right.finish_reason), f"request {number}"
        common = next(
            (i for i, pair in enumerate(zip(left.tokens, right.tokens)) if pair[0] != pair[1]), len(right.tokens)
        )
        num = len(left.prompt) + min(common, len(right.tokens) - 1)
        a, b = left.logits_of_all()[:num], right.logits_of_all()[:num]
        worst = float(((a - b).abs().amax(-1) / b.abs().amax(-1).clamp(min=1)).max())
        assert worst <= LOGITS_BETWEEN_RUNS, f"request {number}: logits differ by {worst:.2e} of the largest"
        if common < len(right.tokens):
            best = b[-1].topk(2).values
            assert float(best[0] - best[1]) < LOGIT_TIE, f"request {number}: token {common} differs"
