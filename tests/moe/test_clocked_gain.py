"""The gain of moves by a clock: like steps compare with like ones, and nothing else counts."""

from __future__ import annotations

import pytest

from moewe.moe.wide_ep.balancing import ClockedGain, PhaseTime


class Steps:
    """Sums that grow."""

    def __init__(self) -> None:
        self.gain, self.sums = ClockedGain(), {"decode": PhaseTime(), "prefill": PhaseTime()}

    def run(self, steps: int, rows: int, seconds: float, *, moved: bool, phase: str = "decode") -> None:
        """Run `steps` steps of so many rows and seconds each."""
        last = self.sums[phase]
        self.sums[phase] = PhaseTime(
            steps=last.steps + steps, rows=last.rows + steps * rows, seconds=last.seconds + steps * seconds
        )
        self.gain.observe(dict(self.sums), moved=moved)


def test_like_steps_are_compared() -> None:
    steps = Steps()
    steps.run(100, 16, 0.010, moved=False)
    steps.run(100, 16, 0.012, moved=False)
    assert (steps.gain.saved_s, steps.gain.compared_steps) == (0.0, 0)
    steps.run(50, 16, 0.008, moved=True)
    assert steps.gain.saved_s == pytest.approx(50 * (0.011 - 0.008)) and steps.gain.compared_steps == 50
    steps.run(10, 16, 0.021, moved=True)
    assert steps.gain.saved_s == pytest.approx(0.15 - 0.1) and steps.gain.compared_steps == 60


def test_other_rows_and_other_phases_say_nothing() -> None:
    steps = Steps()
    steps.run(100, 16, 0.010, moved=False)
    steps.run(100, 32, 0.001, moved=True)
    steps.run(100, 16, 0.001, moved=True, phase="prefill")
    steps.run(0, 0, 0.0, moved=True)
    assert (steps.gain.saved_s, steps.gain.compared_steps) == (0.0, 0)


def test_steps_after_moves_are_no_measure_for_later_ones() -> None:
    steps = Steps()
    steps.run(100, 16, 0.010, moved=False)
    steps.run(100, 16, 0.002, moved=True)
    steps.run(10, 16, 0.010, moved=True)
    assert steps.gain.saved_s == pytest.approx(100 * 0.008)
