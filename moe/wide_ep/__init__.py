"""Placement of experts over ranks and the exchange between them (level 3)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

# Where each name lives. Most bring torch along, which takes seconds, and whoever only plans needs none of these.
_HOMES = {
    "AllToAllExchange": ".exchanges",
    "Dispatched": ".exchanges",
    "Exchange": ".exchanges",
    "LocalExchange": ".exchanges",
    "ShmExchange": ".exchanges",
    "ShmShape": ".exchanges",
    "StagedExchange": ".exchanges",
    "ThreadExchange": ".exchanges",
    "ThreadHub": ".exchanges",
    "ExpertPlacement": ".placement",
    "assign_replicas": ".placement",
    "linear_placement": ".placement",
    "replica_table": ".placement",
    "slots_of": ".placement",
}

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


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
