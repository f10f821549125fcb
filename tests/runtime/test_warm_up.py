"""How long the made-up prompts of a warm-up are, and how many sequences decode together."""

from __future__ import annotations

from moewe.runtime.ranks.warm_up import warm_up_decodes, warm_up_sizes


def test_every_power_of_two_is_tried_where_kernels_are_compiled() -> None:
    assert warm_up_sizes(16, 100, compiles=True) == [100, 64, 32, 16, 8, 4, 2]
    assert warm_up_sizes(16, 64, compiles=True) == [64, 32, 16, 8, 4, 2]
    assert warm_up_sizes(4, 9, compiles=True) == [9, 8, 4, 2]


def test_otherwise_one_is_enough() -> None:
    assert warm_up_sizes(16, 100, compiles=False) == [8]
    assert warm_up_sizes(1, 100, compiles=False) == warm_up_sizes(1, 1, compiles=True) == [1]


def test_decodes_of_every_form_are_tried_where_kernels_are_compiled() -> None:
    assert warm_up_decodes(256, compiles=True) == [256, 17, 2, 1]
    assert warm_up_decodes(12, compiles=True) == [12, 2, 1]
    assert warm_up_decodes(1, compiles=True) == [1]
    assert not warm_up_decodes(256, compiles=False)
