"""Marks of a step: what comes out of the bytes is what was marked, and the clock makes them only where it is told."""

from __future__ import annotations

import itertools

import numpy as np

from moewe.telemetry import RankCounters, StepClock, StepMarks
from moewe.telemetry.step_marks import (
    ATTENTION,
    COMBINE,
    EXPERTS,
    INPUTS,
    NO_LAYER,
    PARTS,
    RESULTS,
    num_marks,
    unpack_marks,
)


def test_marks_come_back_as_they_were_made() -> None:
    marks = StepMarks(70, itertools.count(100).__next__)
    marks.mark(INPUTS)
    marks.layer = 300
    marks.mark(ATTENTION)
    marks.layer = NO_LAYER
    marks.mark(RESULTS)
    packed = marks.packed()
    read = unpack_marks(packed)
    assert (read.waited_from, read.began, num_marks(packed)) == (70, 100, 3)
    assert read.ends.tolist() == [101, 102, 103]
    assert read.parts.tolist() == [INPUTS, ATTENTION, RESULTS] and read.layers.tolist() == [-1, 300, -1]
    nothing = unpack_marks(StepMarks().packed())
    assert nothing.ends.size == nothing.parts.size == 0 and nothing.waited_from == 0


def test_marks_of_native_code_come_in_the_order_of_time_without_what_did_not_run() -> None:
    marks = StepMarks(clock=lambda: 5)
    marks.add_layers(np.array([[10, 0, 12], [0, 20, 21]]), (ATTENTION, EXPERTS, COMBINE))
    read = unpack_marks(marks.packed())
    assert read.ends.tolist() == [10, 12, 20, 21] and read.layers.tolist() == [0, 0, 1, 1]
    assert read.parts.tolist() == [ATTENTION, COMBINE, EXPERTS, COMBINE]


def test_the_clock_of_a_rank_marks_traced_steps_alone() -> None:
    counters = RankCounters(0, 0)
    clock = StepClock(counters)
    for traced, goes_on in ((False, True), (True, False), (True, True), (False, True)):
        clock.begin(traced=traced)
        counters.begin_step("decode", 1)
        clock.mark(INPUTS)
        clock.end(goes_on=goes_on)
        if not traced:
            assert clock.marks is None
            continue
        assert clock.marks is not None
        read = unpack_marks(clock.marks.packed())
        assert [PARTS[part] for part in read.parts] == ["inputs", "results"]
        assert read.began <= read.ends[0] <= read.ends[1]
        # After the first it had sequences to run and waited; after the second it had nothing to do.
        assert (read.waited_from > 0) == (not goes_on)
