"""How tests compare tensors: bitwise where data only moves, by the tolerance of a number format where it is computed.

No test states a tolerance of its own: all of them stand in this file.
Units: relative errors are against the largest (max) or the rms (rms) magnitude of what is expected.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tolerance(NamedTuple):
    """Largest allowed error of any element, and of the rms over all elements, both relative."""

    max: float
    rms: float


TOLERANCES = {
    "float32": Tolerance(max=5e-6, rms=1e-6),
    "bfloat16": Tolerance(max=1.6e-2, rms=6e-3),
    "float16": Tolerance(max=2e-3, rms=8e-4),
    # Of KV with one scale a head of normally distributed numbers: half a step of 16/448 or 1/254 of the largest, and
    # what that is on average, as a scale is rounded up by as much as 1/128.
    "fp8": Tolerance(max=3.7e-2, rms=3e-2),
    "int8": Tolerance(max=4.1e-3, rms=1e-2),
}
LOGITS_AGAINST_REFERENCE = 1e-4  # absolute, fp32 logits of one checkpoint against transformers
# Relative to the largest logit of the row (at least 1), between two of our runs (topologies, batches, chunkings): GEMMs
# of another row count add in another order, which is good for some ten units in the last place.
LOGITS_BETWEEN_RUNS = 1e-5
# Relative (rms of a row), bf16 logits of a network of two to four layers against fp32 on the same weights: some ten
# roundings of 2^-9 each, one after the other; and the multiple of transformers' own error in bf16 that is allowed.
LOGITS_IN_HALF_PRECISION = 2e-2
HALF_PRECISION_FACTOR = 1.5
# Relative (rms of a row), logits with KV of one byte against those with KV in fp32 (case P-KVQ-01).
LOGITS_WITH_SCALED_KV = {"fp8": 5e-2, "int8": 3e-2}
LOGIT_TIE = 1e-4  # absolute: where the reference's two best logits are this close, either token is right
ROUTING_WEIGHTS = 1e-6  # absolute, fp32 routing weights against the reference, before scaling
ROTARY_FREQUENCIES = 1e-6  # relative, fp32 frequencies of a rotary embedding against transformers
EDITED_LOGITS = 1e-4  # absolute, logits below 1000 after bias and penalties in fp32
LOGPROBS = 1e-5  # absolute, fp32 log-probabilities of the same logits
PROBABILITIES = 1e-6  # absolute, cumulated: closer to a boundary than this, either side is right


def _describe(actual: torch.Tensor, expected: torch.Tensor, wrong: torch.Tensor, worst: int) -> str:
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), expected.shape))
    return (
        f"{int(wrong.sum())} of {wrong.numel()} elements differ; at {at}: "
        f"{actual[at].item()!r} instead of {expected[at].item()!r}"
    )


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equal type, shape and bits (NaN equals the same NaN, -0 differs from 0)."""
    assert actual.dtype == expected.dtype, f"{actual.dtype} instead of {expected.dtype}"
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} instead of {tuple(expected.shape)}"
    if not expected.numel():
        return
    actual, expected = actual.detach().cpu().contiguous(), expected.detach().cpu().contiguous()
    as_bytes = [t.view(*t.shape, 1).view(torch.uint8) for t in (actual, expected)]
    wrong = (as_bytes[0] != as_bytes[1]).any(-1)
    if wrong.any():
        raise AssertionError(_describe(actual, expected, wrong, int(wrong.flatten().to(torch.uint8).argmax())))


def assert_near(actual: torch.Tensor, expected: torch.Tensor, *, format: str) -> None:
    """Assert that `actual` is finite and as close to `expected` as arithmetic in `format` allows."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} instead of {tuple(expected.shape)}"
    if not expected.numel():
        return
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    assert actual.isfinite().all(), f"{int((~actual.isfinite()).sum())} elements are not finite"
    tolerance = TOLERANCES[format]
    error = (actual - expected).abs()
    largest = error.max().item() / max(expected.abs().max().item(), 1e-30)
    rms = error.pow(2).mean().sqrt().item() / max(expected.pow(2).mean().sqrt().item(), 1e-30)
    if largest > tolerance.max or rms > tolerance.rms:
        bound = tolerance.max * expected.abs().max()
        detail = _describe(actual, expected, error > bound, int(error.flatten().argmax()))
        raise AssertionError(
            f"relative error max {largest:.2e} (allowed {tolerance.max:.0e}), "
            f"rms {rms:.2e} (allowed {tolerance.rms:.0e}); {detail}"
        )


def assert_within(actual: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    """Assert that no element of `actual` is further than `bound` (one of this module's) from `expected`."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} instead of {tuple(expected.shape)}"
    if not expected.numel():
        return
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    assert actual.isfinite().all(), f"{int((~actual.isfinite()).sum())} elements are not finite"
    error = (actual - expected).abs()
    if error.max() > bound:
        detail = _describe(actual, expected, error > bound, int(error.flatten().argmax()))
        raise AssertionError(f"largest difference {error.max().item():.2e} (allowed {bound:.0e}); {detail}")
