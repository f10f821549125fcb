"""Windows of loads from counters: phases apart, replicas together, none shorter than asked, across moves of experts."""

from __future__ import annotations

import numpy as np

from moewe.moe.wide_ep.balancing import LoadCollector, total_steps
from moewe.moe.wide_ep.balancing.load_steps import total_load
from moewe.moe.wide_ep.placement import first_placement, linear_placement


def test_phases_are_kept_apart_and_counted_from_the_last_window() -> None:
    collector = LoadCollector(linear_placement(1, 4, 2), top_k=2, least_tokens=5)
    assert collector.observe({"decode": np.array([[3, 1, 0, 0]])}, {"decode": 2}) is None, "2 tokens of 5"
    window = collector.observe(
        {"decode": np.array([[4, 2, 0, 0]]), "prefill": np.array([[0, 0, 2, 2]])}, {"decode": 3, "prefill": 1}
    )
    assert window is not None
    prefill, decode = window
    assert (prefill.load.tolist(), prefill.steps) == ([[0, 0, 2, 2]], 1)
    assert (decode.load.tolist(), decode.steps) == ([[4, 2, 0, 0]], 3)
    assert total_load(window).tolist() == [[4, 2, 2, 2]] and total_steps(window) == 4
    window = collector.observe(
        {"decode": np.array([[14, 2, 0, 0]]), "prefill": np.array([[0, 0, 2, 2]])}, {"decode": 7, "prefill": 1}
    )
    assert window is not None and len(window) == 1, "nothing was prefilled"
    assert (window[0].load.tolist(), window[0].steps) == ([[10, 0, 0, 0]], 4)


def test_replicas_count_for_their_expert_and_moves_do_not_mix() -> None:
    """Slots 0-2 of rank 0 and 3-5 of rank 1; expert 0 stands twice at first, then slot 3 holds expert 3."""
    before = first_placement(1, 4, num_redundant=2, domains=(0, 0))
    slots = before.physical_to_logical.copy()
    collector = LoadCollector(before, top_k=1, least_tokens=12)
    counts = np.array([[1, 1, 1, 1, 1, 1]])
    assert collector.observe({"decode": counts}, {"decode": 1}) is None
    slots[0, 0], slots[0, 5] = slots[0, 5], slots[0, 0]
    collector.place(before.with_layers(slots, np.ones((1, 4)), [0]))
    window = collector.observe({"decode": counts + np.array([[6, 0, 0, 0, 0, 0]])}, {"decode": 2})
    assert window is not None
    expected = np.bincount(before.physical_to_logical[0], minlength=4)
    expected[slots[0, 0]] += 6
    assert window[0].load.tolist() == [expected.tolist()]


def test_a_window_knows_which_ranks_its_tokens_came_from() -> None:
    collector = LoadCollector(linear_placement(1, 4, 2), top_k=1, least_tokens=4)
    counts, steps = {"decode": np.array([[2, 2, 0, 0]])}, {"decode": 1}
    window = collector.observe(counts, steps, {"decode": np.array([3, 1])})
    assert window is not None and window[0].origin is not None and window[0].origin.tolist() == [0.75, 0.25]
    counts, steps = {"decode": np.array([[6, 2, 0, 0]])}, {"decode": 2}
    window = collector.observe(counts, steps, {"decode": np.array([3, 5])})
    assert window is not None and window[0].origin is not None and window[0].origin.tolist() == [0.0, 1.0]
    window = collector.observe({"decode": np.array([[6, 6, 0, 0]])}, {"decode": 3})
    assert window is not None and window[0].origin is None, "nobody said"
