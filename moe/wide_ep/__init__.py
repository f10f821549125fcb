"""Placement of experts over ranks and the exchange between them (level 3)."""

from .exchanges import (
    AllToAllExchange,
    Dispatched,
    Exchange,
    LocalExchange,
    ShmExchange,
    ShmShape,
    StagedExchange,
    ThreadExchange,
    ThreadHub,
)
from .placement import ExpertPlacement, assign_replicas, linear_placement, replica_table, slots_of

__all__ = [
    "AllToAllExchange",
    "Dispatched",
    "Exchange",
    "ExpertPlacement",
    "LocalExchange",
    "ShmExchange",
    "ShmShape",
    "StagedExchange",
    "ThreadExchange",
    "ThreadHub",
    "assign_replicas",
    "linear_placement",
    "replica_table",
    "slots_of",
]
