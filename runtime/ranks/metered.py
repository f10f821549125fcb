"""Meters the collectives of an attention replica under the scope that its ranks span.

Not a way for them to meet (runtime/attention_ranks.py).
"""

from __future__ import annotations

from ...attention.tensor_parallel import TensorParallelGroup
from ...attention.tensor_parallel_metered import MeteredGroup
from ...topologies import parse_topology
from ...topologies.grid import RankGrid
from ..config import EngineConfig


def metered(ranks: TensorParallelGroup | None, config: EngineConfig, rank: int) -> MeteredGroup | None:
    """Return `ranks`, with which `rank` divides heads, so that what they do is booked; None for none."""
    if ranks is None:
        return None
    topology, first = parse_topology(config.parallel.topology), rank - ranks.share.rank
    domains = RankGrid(topology, topology.num_ranks).domains()[first : first + ranks.share.size]
    return MeteredGroup(ranks, "domain" if len(set(domains)) == 1 else "between")
