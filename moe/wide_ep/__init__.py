"""Placement of experts over ranks and the exchange between them (level 3)."""

from .exchange import Dispatched, Exchange
from .exchange_all_to_all import AllToAllExchange
from .exchange_local import LocalExchange
from .exchange_shm import ShmExchange, ShmShape
from .exchange_threads import ThreadExchange, ThreadHub
from .placement import ExpertPlacement, assign_replicas, linear_placement, replica_table

__all__ = [
    "AllToAllExchange",
    "Dispatched",
    "Exchange",
    "ExpertPlacement",
    "LocalExchange",
    "ShmExchange",
    "ShmShape",
    "ThreadExchange",
    "ThreadHub",
    "assign_replicas",
    "linear_placement",
    "replica_table",
]
