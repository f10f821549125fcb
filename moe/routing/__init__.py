"""From router logits to experts and weights; knows nothing of ranks (level 2)."""

from .router import SCORINGS, Routing, RoutingConfig, route

__all__ = ["SCORINGS", "Routing", "RoutingConfig", "route"]
