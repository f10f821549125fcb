"""The tests of the kernels once more for every kind of instructions that they can be compiled for.

Those of attention see to it themselves (tests/attention/test_native_bits.py).
"""

from __future__ import annotations

import pytest

from moewe.native.cpu import ISAS
from moewe.native.library import native_isa
from tests.support.native import needs_native, run_tests_on

AREAS = {
    "products": (
        "tests/quant/test_packed.py",
        "tests/quant/test_head_linear.py",
        "tests/quant/test_quantize.py",
        "tests/quant/test_quantized_products.py",
        "tests/quant/test_pack_codes.py",
    ),
    "experts": (
        "tests/moe/test_native_experts.py",
        "tests/moe/test_quantized_experts.py",
        "tests/moe/test_stored_experts.py",
    ),
    "rows": (
        "tests/moe/test_native_route.py",
        "tests/models/test_native_norm.py",
        "tests/models/test_native_latent.py",
    ),
    "exchange": (
        "tests/moe/exchanges/test_exchange_shm.py",
        "tests/runtime/test_exchange_faults.py",
    ),
    "tokens": (
        "tests/runtime/test_row_scan.py",
        "tests/runtime/test_sampler.py",
        "tests/runtime/test_logprobs.py",
    ),
    "whole models": (
        "tests/e2e/test_bitwise.py",
        "tests/e2e/test_overflow.py",
        "tests/e2e/test_quantization.py",
    ),
}


@needs_native
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("area", AREAS)
def test_kernels_of(area: str, isa: str) -> None:
    if isa == native_isa():
        pytest.skip(f"{isa} is what these tests use anyway")
    run_tests_on(isa, *AREAS[area])
