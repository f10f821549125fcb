"""What counts as the same answer: logits within a tolerance, greedy tokens equal, near-ties of the reference excused.

Not running anything: it compares `Outcome`s of tests/support/harness.py with transformers and with each other.
Shapes: logits [T, V] f32 by position; position p predicts token p + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from tests.support.fixtures import reference_logits
from tests.support.harness import Outcome
from tests.support.numerics import LOGIT_TIE, LOGITS_AGAINST_REFERENCE, LOGITS_BETWEEN_RUNS


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
