"""Load windows: what they cover, what they forget, and what becomes of slots with the same expert."""

from __future__ import annotations

import numpy as np
import pytest

from moewe.moe.wide_ep.balancing import SlotWindow, logical_load, rank_imbalance
from moewe.moe.wide_ep.placement import balanced_placement, expert_load, traffic
from moewe.moe.wide_ep.synthetic import zipf


def decode(count: int) -> dict[str, np.ndarray]:
    return {"decode": np.array([[count, 2 * count]])}


def test_a_young_window_covers_everything() -> None:
    window = SlotWindow(span_s=60.0)
    assert window.tokens().shape == (0, 0)
    window.observe(100.0, decode(3))
    window.observe(110.0, decode(5))
    assert window.tokens("decode").tolist() == [[5, 10]]
    assert window.tokens("prefill").tolist() == [[0, 0]]


@pytest.mark.parametrize("parts", [1, 4, 10])
def test_a_window_reaches_back_its_span_and_at_most_a_part_more(parts: int) -> None:
    window = SlotWindow(span_s=60.0, parts=parts)
    for now in range(0, 1000):  # a token each second
        window.observe(float(now), decode(now))
        covered = window.tokens()[0, 0]
        assert covered <= 60 + 60 / parts, now
        assert covered >= min(now, 60), now


def test_memory_does_not_grow_with_observations() -> None:
    window = SlotWindow(span_s=10.0, parts=4)
    for now in range(10_000):
        window.observe(now / 7, decode(now))
    assert len(window._marks) == 5


def test_phases_are_kept_apart_and_add_up() -> None:
    window = SlotWindow(span_s=60.0)
    window.observe(0.0, {"prefill": np.array([[7, 0]]), "decode": np.array([[1, 2]])})
    assert window.tokens("prefill").tolist() == [[7, 0]]
    assert window.tokens("decode").tolist() == [[1, 2]]
    assert window.tokens().tolist() == [[8, 2]]


@pytest.mark.parametrize("later", [decode(2), {"decode": np.array([[4, 4, 4]])}])
def test_ranks_that_start_again_start_a_new_window(later: dict[str, np.ndarray]) -> None:
    window = SlotWindow(span_s=60.0)
    window.observe(0.0, decode(100))
    window.observe(1.0, later)
    assert window.tokens().tolist() == later["decode"].tolist()


def test_what_was_told_may_change_afterwards() -> None:
    window, counts = SlotWindow(span_s=60.0), decode(4)
    window.observe(0.0, counts)
    counts["decode"][...] = 99
    assert window.tokens().tolist() == [[4, 8]]


UNEVEN = {"prefill": np.zeros((1, 2)), "decode": np.zeros((1, 3))}


@pytest.mark.parametrize("counts", [{"mixed": np.zeros((1, 2))}, {"decode": np.zeros(3)}, UNEVEN])
def test_counts_of_another_kind_are_refused(counts: dict[str, np.ndarray]) -> None:
    with pytest.raises(ValueError, match="counts must be"):
        SlotWindow(span_s=1.0).observe(0.0, counts)


def test_windows_without_length_are_refused() -> None:
    for span_s, parts in ((0.0, 4), (float("nan"), 4), (1.0, 0)):
        with pytest.raises(ValueError, match="span_s"):
            SlotWindow(span_s=span_s, parts=parts)


def test_slots_give_back_the_load_and_the_imbalance_of_the_traffic() -> None:
    ids = np.stack([zipf(512, 16, 4, seed=seed) for seed in range(3)])
    load = expert_load(ids, 16)
    placement = balanced_placement(load, num_redundant=4, domains=(0, 0, 0, 0))
    source = np.arange(512) % 4
    tokens = np.zeros((3, 20), np.int64)
    expected = []
    for layer in range(3):
        slots = placement.slot_of[layer][source[:, None], ids[layer]]
        tokens[layer] = np.bincount(slots.ravel(), minlength=20)
        expected.append(traffic(ids[layer], placement, layer, source).imbalance)
    assert (logical_load(tokens, placement.physical_to_logical, 16) == load).all()
    assert rank_imbalance(tokens, placement.slot_ranges) == pytest.approx(expected)
    with pytest.raises(ValueError, match="must agree"):
        logical_load(tokens[:, 1:], placement.physical_to_logical, 16)


def test_a_layer_without_traffic_is_even() -> None:
    assert rank_imbalance(np.array([[0, 0], [3, 1]]), ((0, 1), (1, 2))).tolist() == [1.0, 1.5]
