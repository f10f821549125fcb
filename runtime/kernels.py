"""Which kernels the ranks will run and what joins them, settled before any of them is started.

Not the compilation (native/build.py) and not a kernel. Whoever starts replicas calls it; ranks find a finished library.
"""

from __future__ import annotations

import logging

from ..native.library import prepare
from ..topologies import RankGrid, Topology
from ..topologies.exchange_choice import ExchangeFacts, ExchangeRule
from .config import EngineConfig

log = logging.getLogger(__name__)


def exchange_rule(config: EngineConfig, topology: Topology, *, has_native: bool) -> ExchangeRule:
    """Return which exchange a group of `topology` uses in which step, on this host.

    Args:
        config: its device and what it asks for.
        topology: of the group; its ranks sit in one domain unless it names several.
        has_native: ranks on a CPU will have native kernels; to know it can mean to compile them.
    """
    parallel = config.parallel
    facts = ExchangeFacts(
        device=parallel.device,
        as_threads=parallel.ranks == "threads",
        has_native=has_native,
        asked=parallel.exchange,
        payload=parallel.exchange_payload,
        captures=captures_steps(config, topology),
    )
    return ExchangeRule(grid=RankGrid(topology, topology.num_ranks), facts=facts)


def captures_steps(config: EngineConfig, topology: Topology) -> bool:
    """Tell whether decode steps of `topology` are to become CUDA graphs, as far as that is not up to the exchange."""
    return config.parallel.device == "cuda" and not config.graphs.enforce_eager and topology.atp == 1


def prepare_kernels(config: EngineConfig) -> None:
    """Compile the native kernels if this machine has not yet, and say which are used; nothing on a GPU."""
    if config.parallel.device != "cpu":
        return
    outcome = prepare()
    if outcome.library is not None:
        log.info("CPU kernels: native, %s", outcome.why)
