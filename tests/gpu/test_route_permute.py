"""Choice, sorting and tiles in one launch against the launches that do them one by one, which have references."""

from __future__ import annotations

import pytest
import torch

from moewe.moe.kernels.permute import triton_permute
from moewe.moe.kernels.route import triton_route
from moewe.moe.kernels.route_permute import fits_one_program, route_permute_launch
from moewe.moe.kernels.row_tiles import empty_tiles, tiles_launch
from moewe.moe.routing import RoutingConfig
from tests.support.numerics import ROUTING_WEIGHTS, assert_same, assert_within

CONFIGS = {
    "softmax": {"num_experts": 16, "top_k": 4, "scoring": "softmax", "renormalize": True},
    "odd": {"num_experts": 13, "top_k": 3, "scoring": "sigmoid", "renormalize": False},
    "groups": {"num_experts": 16, "top_k": 2, "scoring": "sigmoid", "renormalize": True, "num_groups": 4,
               "top_groups": 2},
    "one": {"num_experts": 8, "top_k": 1, "scoring": "sigmoid", "renormalize": False},
    "sparsemixer": {"num_experts": 16, "top_k": 2, "scoring": "sparsemixer", "renormalize": False, "jitter": 0.2},
}  # fmt: skip


@pytest.mark.parametrize(("name", "num_tokens", "num_filled"), [
    ("softmax", 1, None), ("softmax", 7, None), ("softmax", 32, 30), ("odd", 1, 0), ("odd", 5, 4), ("groups", 9, None),
    ("one", 5, 2), ("sparsemixer", 3, None),
])  # fmt: skip
def test_one_launch_does_what_three_do(name: str, num_tokens: int, num_filled: int | None) -> None:
    config = RoutingConfig(**CONFIGS[name])
    generator = torch.Generator().manual_seed(num_tokens)
    logits = torch.randn(num_tokens, config.num_experts, generator=generator)
    bias = None if name == "sparsemixer" else 0.3 * torch.randn(config.num_experts, generator=generator)
    num_slots = config.num_experts - 2  # two experts have none
    slot_of = torch.full((config.num_experts + 1,), -1, dtype=torch.int32)
    slot_of[torch.randperm(config.num_experts, generator=generator)[:num_slots]] = torch.arange(num_slots).int()
    filled = None if num_filled is None else torch.tensor([num_filled])
    counts = torch.full((num_slots,), -7)
    cut = empty_tiles(num_tokens * config.top_k, num_slots, 4, logits.device)
    launch, (chosen, permuted) = route_permute_launch(
        logits, config, bias, slot_of, counts=counts, cut=cut, num_filled=filled
    )
    launch.run()

    want, slot_ids = triton_route(logits, config, bias, slot_of, filled)
    sorted_by_slot = triton_permute(slot_ids, num_slots)
    num_rows = int(sorted_by_slot.tokens_per_slot.sum())
    tiles, expected = tiles_launch(sorted_by_slot.tokens_per_slot, num_tokens * config.top_k, 4)
    tiles.run()
    assert_same(chosen.topk_ids, want.topk_ids)
    assert_within(chosen.topk_weights, want.topk_weights, ROUTING_WEIGHTS)
    assert_same(permuted.rows, sorted_by_slot.rows)
    assert_same(counts, sorted_by_slot.tokens_per_slot)
    assert_same(permuted.row_tokens[:num_rows], sorted_by_slot.row_tokens[:num_rows])
    unwritten = permuted.row_tokens[num_rows:]
    assert_same(unwritten, torch.full_like(unwritten, torch.iinfo(torch.int32).max))
    assert_same(cut.num_tiles, expected.num_tiles)
    assert_same(cut.tiles[:, 0], expected.tiles[:, 0])
    assert_same(cut.tiles[: int(cut.num_tiles)], expected.tiles[: int(cut.num_tiles)])


def test_one_program_takes_as_many_tokens_as_it_can_sort_and_hold() -> None:
    eight, every = (RoutingConfig(num_experts=128, top_k=k, scoring="softmax", renormalize=False) for k in (8, 128))
    many = RoutingConfig(num_experts=2048, top_k=8, scoring="softmax", renormalize=False)
    none = RoutingConfig(num_experts=256, top_k=256, scoring="softmax", renormalize=False)
    assert [fits_one_program(number, eight) for number in (0, 1, 16, 17)] == [False, True, True, False]
    assert [fits_one_program(number, every) for number in (1, 2)] == [True, False]
    assert [fits_one_program(number, many) for number in (2, 3)] == [True, False]
    assert not fits_one_program(1, none)
