"""Native products between torch's own, which use the same tile registers in another configuration."""

from __future__ import annotations

import torch

from moewe.quant import pack
from moewe.quant.linear import linear
from tests.support.native import needs_native, team_of
from tests.support.numerics import assert_same


@needs_native
def test_native_and_torch_products_take_turns() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 512, generator=generator).to(torch.bfloat16)
    x = torch.randn(64, 512, generator=generator).to(torch.bfloat16)
    packed = pack(weight)
    native, theirs = linear(x, packed), linear(x, weight)
    for rows in (64, 1, 33, 64):
        for threads in (1, 2):
            with team_of(threads):
                assert_same(linear(x[:rows], packed), native[:rows])
            torch.mm(x[:rows], weight.T)
    assert_same(linear(x, weight), theirs)
