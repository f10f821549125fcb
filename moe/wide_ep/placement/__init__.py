"""Placement of experts: policies are pure (numpy in, arrays out), the record and its tables are what layers use."""

from .affinity import above_chance, affinity_of, coactivation, strongest_pairs
from .balanced import balanced_placement, first_placement
from .baselines import linear_placement, round_robin_placement
from .drawing import draw_placement
from .eplb import eplb_placement
from .measures import Traffic, expert_load, imbalance, traffic
from .record import ExpertPlacement, assign_replicas, placement_of, replica_table, slots_of

__all__ = [
    "ExpertPlacement",
    "Traffic",
    "above_chance",
    "affinity_of",
    "assign_replicas",
    "balanced_placement",
    "coactivation",
    "draw_placement",
    "eplb_placement",
    "expert_load",
    "first_placement",
    "imbalance",
    "linear_placement",
    "placement_of",
    "replica_table",
    "round_robin_placement",
    "slots_of",
    "strongest_pairs",
    "traffic",
]
