"""From router logits to experts and weights; knows nothing of ranks (level 2)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import SCORINGS, RoutingConfig
    from .router import Routing, route

# Where each name lives. Most bring torch along, which takes seconds, and whoever only plans needs none of these.
_HOMES = {
    "RoutingConfig": ".config",
    "SCORINGS": ".config",
    "Routing": ".router",
    "route": ".router",
}

__all__ = [
    "SCORINGS",
    "Routing",
    "RoutingConfig",
    "route",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
