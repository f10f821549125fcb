"""The padded exchange: fixed shapes, and nothing on its path that waits for a value to reach the host."""

from __future__ import annotations

import pytest
import torch

from moewe.moe.wide_ep.exchanges import StepwiseExchange, ThreadHub
from moewe.moe.wide_ep.exchanges.group_shape import GroupShape
from moewe.moe.wide_ep.exchanges.joining import join_over_links
from moewe.moe.wide_ep.exchanges.links import Pending
from moewe.moe.wide_ep.exchanges.padded import PaddedExchange
from moewe.topologies.exchange_cost import capacity_of

SHAPE = GroupShape(slot_ranges=((0, 3), (3, 6), (6, 8)))


class EmptyLink:
    """A link of three members on which room arrives and nothing else."""

    size, index, held_bytes = 3, 1, 0

    def start(self, rows: torch.Tensor, sent: list[int], received: list[int], **_: bool) -> Pending:
        return lambda: torch.empty(sum(received), rows.shape[1], dtype=rows.dtype, device=rows.device)

    def gather(self, rows: torch.Tensor) -> Pending:
        return lambda: rows.repeat(self.size, 1)


def run(exchange, num_tokens, device):
    ids = torch.zeros(num_tokens, 2, dtype=torch.int32, device=device)
    arrived = exchange.dispatch(torch.zeros(num_tokens, 256, dtype=torch.bfloat16, device=device), ids)
    rows = torch.zeros(arrived.num_rows, 256, dtype=torch.bfloat16, device=device)
    return arrived, exchange.combine(rows, torch.zeros(num_tokens, 2, device=device), arrived.handle)


def test_meta_tensors_refuse_to_be_waited_for():
    """What the next test leans on: on the meta device there is no value to wait for."""
    for wait in (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.nonzero, bool):
        with pytest.raises((RuntimeError, NotImplementedError)):
            wait(torch.ones(1, device="meta"))


@pytest.mark.parametrize("payload", ["auto", "fp8"])
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 8])
def test_no_value_comes_to_the_host(payload, num_tokens):
    exchange = join_over_links("padded", SHAPE, 1, lambda ranks: EmptyLink(), payload=payload)
    exchange.begin_step(8)
    arrived, combined = run(exchange, num_tokens, "meta")
    assert arrived.num_rows == 3 * 8 * 2 and arrived.source.shape == (3 * 8, 256)
    assert arrived.tokens_per_slot.shape == (3,) and arrived.tokens_per_slot.device.type == "meta"
    assert combined.shape == (num_tokens, 256)


def test_all_to_all_does_wait():
    """The same look at an exchange of variable sizes fails: the test above can."""
    exchange = join_over_links("all_to_all", SHAPE, 1, lambda ranks: EmptyLink())
    with pytest.raises((RuntimeError, NotImplementedError)):
        run(exchange, 4, "meta")


def test_room_is_the_next_power_of_two():
    assert [capacity_of(bucket) for bucket in (0, 1, 2, 3, 4, 5, 64, 65)] == [1, 1, 2, 4, 4, 8, 64, 128]


def test_all_rows_to_one_slot_do_not_overflow():
    exchange = PaddedExchange(EmptyLink(), SHAPE)
    exchange.begin_step(4)
    ids = torch.full((4, 2), 3, dtype=torch.int32)
    arrived = exchange.dispatch(torch.ones(4, 16), ids)
    assert arrived.tokens_per_slot.tolist() == [24, 0, 0] == [arrived.num_rows, 0, 0]
    with pytest.raises(AssertionError, match="5 rows, but the plan's bucket makes room for 4"):
        exchange.dispatch(torch.ones(5, 16), torch.zeros(5, 2, dtype=torch.int32))


def test_each_step_uses_the_exchange_that_it_is_told():
    shape = GroupShape(slot_ranges=((0, 4),))
    hub = ThreadHub(shape.slot_ranges)
    both = StepwiseExchange([join_over_links(n, shape, 0, lambda r: hub.link(r, 0)) for n in ("all_to_all", "padded")])
    assert both.names == ("all_to_all", "padded") and both.output(3) is None
    x, ids, weights = torch.randn(3, 8), torch.tensor([[1, 2], [3, 0], [-1, 2]], dtype=torch.int32), torch.rand(3, 2)
    found = []
    for name in ("padded", "all_to_all"):
        both.begin_step(name, 3)
        assert both.name == name
        arrived = both.dispatch(x, ids)
        assert arrived.is_padded == (name == "padded")
        found.append(both.combine(arrived.rows, weights, arrived.handle))
    assert torch.equal(*found)
    assert both.take_traffic().num_bytes[0] > 0 and sum(both.take_traffic().num_bytes) == 0
