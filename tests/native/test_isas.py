"""The tests of the kernels once more for every kind of instructions that they can be compiled for.

One process a kind: most of what a short run costs is importing torch. What checks no kernel (torch's way of a choice,
refusals) is left out.
"""

from __future__ import annotations

import pytest

from moewe.native.cpu import ISAS
from moewe.native.library import native_isa
from tests.support.native import needs_native, run_tests_on

BITS = "tests/e2e/test_bitwise.py"
TESTS = (
    # products
    "tests/quant/test_packed.py",
    "tests/quant/test_head_linear.py",
    "tests/quant/test_quantize.py",
    "tests/quant/test_quantized_products.py",
    "tests/quant/test_pack_codes.py",
    # experts
    "tests/moe/test_native_experts.py",
    "tests/moe/test_quantized_experts.py",
    "tests/moe/test_stored_experts.py",
    # attention
    "tests/attention/test_native.py",
    "tests/attention/test_native_bits.py",
    "tests/attention/test_native_heads.py",
    "tests/attention/test_native_scaled.py",
    # rows
    "tests/moe/test_native_route.py",
    "tests/models/test_native_norm.py",
    "tests/models/test_native_latent.py",
    # exchange
    "tests/moe/exchanges/test_exchange_shm.py::test_equals_reference",
    # tokens
    "tests/runtime/test_row_scan.py",
    "tests/runtime/test_sampler.py::test_filters_keep_exactly_the_reference_set[native]",
    "tests/runtime/test_sampler.py::test_draw_is_the_inverse_of_the_reference_distribution[native]",
    "tests/runtime/test_logprobs.py::test_they_equal_the_reference[native]",
    "tests/runtime/test_logprobs.py::test_large_vocabularies_equal_the_reference[native-1025]",
    "tests/runtime/test_logprobs.py::test_a_row_has_the_same_bits_in_any_company",
    # whole models: heads with KV in every format and weights of int8 and int4, latents, four and eight bits as stored
    f"{BITS}::test_any_company_gives_the_same_bits",
    *(
        f"{BITS}::test_every_way_to_run_gives_the_same_bits[{name}-auto]"
        for name in ("T-DS3", "T-GOS mxfp4", "T-MM2 fp8")
    ),
    "tests/e2e/test_overflow.py",
)


@needs_native
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("isa", ISAS)
def test_kernels_on(isa: str) -> None:
    if isa == native_isa():
        pytest.skip(f"{isa} is what these tests use anyway")
    run_tests_on(isa, *TESTS)
