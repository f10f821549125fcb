"""Placement of experts over ranks and the exchange between them (level 3)."""

from .exchange import Dispatched, Exchange
from .placement import ExpertPlacement, assign_replicas, linear_placement, replica_table

__all__ = ["Dispatched", "Exchange", "ExpertPlacement", "assign_replicas", "linear_placement", "replica_table"]
