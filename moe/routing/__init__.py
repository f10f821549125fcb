"""From router logits to experts and weights; knows nothing of ranks (level 2)."""

from .router import Routing, RoutingConfig, route

__all__ = ["Routing", "RoutingConfig", "route"]
