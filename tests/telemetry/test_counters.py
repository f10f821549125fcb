"""Counters of a rank, and the clock that splits its time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from moewe.telemetry import COMPONENTS, PHASES, RankCounters, StepClock

DECODE, PREFILL = PHASES.index("decode"), PHASES.index("prefill")


def ticking(*times: float) -> Callable[[], float]:
    """Return a clock that shows one of `times` after the other."""
    return iter(times).__next__


def test_bytes_and_operations_go_to_the_component_of_the_running_phase() -> None:
    counters = RankCounters(1, 2)
    counters.begin_step("decode", 3)
    counters.add_bytes("kv", 7)
    counters.add_flops("routed", 1e20)
    counters.begin_step("prefill", 5)
    counters.add_bytes("kv", 11)
    moved = np.zeros((len(PHASES), len(COMPONENTS)), np.int64)
    moved[DECODE, COMPONENTS.index("kv")], moved[PREFILL, COMPONENTS.index("kv")] = 7, 11
    np.testing.assert_array_equal(counters.bytes_moved, moved)
    assert counters.flops[DECODE, COMPONENTS.index("routed")] == counters.flops.sum() == 1e20
    assert counters.tokens[DECODE] == 3 and counters.tokens[PREFILL] == 5


def test_bytes_of_weeks_begin_again_instead_of_failing() -> None:
    counters = RankCounters(0, 0)
    counters.begin_step("decode", 1)
    counters.add_bytes("dense", (1 << 63) - 1)
    counters.add_bytes("dense", 6)
    assert counters.bytes_moved.sum() == 5


def test_clear_sets_everything_to_zero() -> None:
    counters = RankCounters(1, 2)
    counters.begin_step("decode", 3)
    counters.add_bytes("kv", 7)
    counters.add_flops("kv", 7)
    counters.add_exchange((1, 2, 3), (0.5, 0.5, 0.5))
    counters.add_expert_tokens(np.ones((1, 2), np.int64))
    counters.end_step(1.0, 0.5, 0.25)
    counters.unowned_ids, counters.measured_bytes = 1, 2.0
    counters.clear()
    arrays = [value for value in vars(counters).values() if isinstance(value, np.ndarray)]
    assert (
        len(arrays) == 11
        and not any(array.any() for array in arrays)
        and counters.unowned_ids == counters.measured_bytes == 0
    )


def test_clock_tells_the_host_part_of_steps_and_waiting_for_plans() -> None:
    """Steps from 10 to 20 and from 23 to 30 with a plan that came late, then one at 100 after nothing was to do."""
    counters = RankCounters(0, 0)
    clock = StepClock(counters, ticking(0, 10, 11, 16, 18, 20, 23, 24, 27, 30, 100, 101, 103, 104))
    for phase, looks, goes_on in (("prefill", 2, True), ("decode", 1, False), ("decode", 1, False)):
        clock.begin()
        counters.begin_step(phase, 1)
        clock.inputs_ready()
        for _ in range(looks):
            clock.computed()
        busy = clock.end(goes_on=goes_on)
    assert busy == 4
    assert (counters.busy_seconds[PREFILL], counters.host_seconds[PREFILL]) == (10, 1 + 2)
    assert (counters.busy_seconds[DECODE], counters.host_seconds[DECODE]) == (7 + 4, 1 + 3 + 1 + 1)
    assert counters.starved_seconds[PREFILL] == 0 and counters.starved_seconds[DECODE] == 3


def test_phases_and_components_have_names() -> None:
    counters = RankCounters(0, 0)
    with pytest.raises(KeyError):
        counters.begin_step("lunch", 1)
    with pytest.raises(KeyError):
        counters.add_flops("lunch", 1)


def test_what_was_put_off_is_added_when_counters_are_settled_or_told_or_begun_anew() -> None:
    from moewe.runtime.metrics.stats import counters_of, encode_counters

    counters, noted = RankCounters(1, 2), [5]

    def add() -> None:
        while noted:
            counters.add_bytes("kv", noted.pop())

    counters.put_off = add
    assert counters.bytes_moved.sum() == 0
    counters.settle()
    assert counters.bytes_moved.sum() == 5
    noted.append(6)
    assert counters_of(encode_counters(counters)).bytes_moved.sum() == 11
    noted.append(7)
    counters.clear()
    counters.settle()
    assert counters.bytes_moved.sum() == 0
