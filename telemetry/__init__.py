"""Counters and signs of life (level 0)."""

from .counters import COMPONENTS, PHASES, RankCounters
from .progress import ProgressBoard, RankProgress

__all__ = ["COMPONENTS", "PHASES", "ProgressBoard", "RankCounters", "RankProgress"]
