"""The tests of the kernels once more for every kind of instructions that they can be compiled for."""

from __future__ import annotations

import pytest

from moewe.native.cpu import ISAS
from tests.support.native import needs_native, run_tests_on

FILES = (
    "tests/quant/test_packed.py",
    "tests/quant/test_head_linear.py",
    "tests/quant/test_quantize.py",
    "tests/quant/test_quantized_products.py",
    "tests/quant/test_pack_codes.py",
    "tests/moe/test_native_experts.py",
    "tests/moe/test_quantized_experts.py",
    "tests/moe/test_stored_experts.py",
    "tests/models/test_native_latent.py",
    "tests/runtime/test_logprobs.py",
)


@needs_native
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("isa", ISAS)
def test_kernels_of(isa: str) -> None:
    run_tests_on(isa, *FILES)
