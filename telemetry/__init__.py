"""Counters, signs of life and memory of processes (level 0)."""

from .counters import COMPONENTS, PHASES, SCOPES, RankCounters
from .energy import HostEnergy, WrappingCounter
from .memory import MEMORY_PARTS, peak_of, peak_of_family, resident_of
from .progress import ProgressBoard, RankProgress
from .step_clock import StepClock
from .step_marks import StepMarks

__all__ = [
    "COMPONENTS",
    "MEMORY_PARTS",
    "PHASES",
    "SCOPES",
    "HostEnergy",
    "ProgressBoard",
    "RankCounters",
    "RankProgress",
    "StepClock",
    "StepMarks",
    "WrappingCounter",
    "peak_of",
    "peak_of_family",
    "resident_of",
]
