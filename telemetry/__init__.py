"""Counters, signs of life and memory of processes (level 0)."""

from .counters import COMPONENTS, PHASES, SCOPES, RankCounters
from .memory import MEMORY_PARTS, peak_of, peak_of_family, resident_of
from .progress import ProgressBoard, RankProgress
from .step_clock import StepClock
from .step_marks import StepMarks

__all__ = [
    "COMPONENTS",
    "MEMORY_PARTS",
    "PHASES",
    "SCOPES",
    "ProgressBoard",
    "RankCounters",
    "RankProgress",
    "StepClock",
    "StepMarks",
    "peak_of",
    "peak_of_family",
    "resident_of",
]
