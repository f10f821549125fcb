"""The MoE layer: route, assign replicas, dispatch, experts, combine (level 4)."""
