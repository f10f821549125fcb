"""Little Python between kernels: a decode step of one rank is a handful of native calls, whatever the layers."""

from __future__ import annotations

import pytest

from tests.support.fixtures import checkpoint, random_prompt
from tests.support.harness import Group, greedy
from tests.support.native import needs_native
from tests.support.native_calls import count_native_calls
from tests.support.setups import Setup

pytestmark = needs_native

MOST_CALLS_A_LAYER = 4


@pytest.mark.parametrize("quantization", [None, "int8"], ids=["bf16", "int8"])
def test_a_decode_step_makes_few_native_calls(quantization: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_native_calls(monkeypatch)
    setup = Setup(dtype="bfloat16", quantization=quantization, keep_logits=False, depth=1)
    with Group(checkpoint("T-QW3", dtype="bfloat16"), setup) as group:
        for i in range(3):
            group.submit(str(i), random_prompt(8, seed=i), greedy(8))
        group.step()
        assert group.steps[-1].kind == "prefill" and calls, "nothing is counted"
        calls.clear()
        group.step()
        assert group.steps[-1].kind == "decode" and group.steps[-1].rows == (3,)
        num_layers = group.model.num_layers
    assert calls.total() <= MOST_CALLS_A_LAYER * num_layers
    # All layers in one call, the head, and a look at hidden rows and at logits: four, and two a layer of this model.
    assert calls == {"moewe_layers": 1, "moewe_linear": 1, "moewe_scan_rows": 2}
