"""`--topology auto`: what this machine is, in the terms of `topologies.choose_topology`, and its answer, logged.

Not the choice itself (topologies/choice.py): it knows options and devices, that one knows neither.
Units: bytes, tokens, logical CPUs.
"""

from __future__ import annotations

import logging

from ..topologies import Machine, ModelFootprint, Topology, choose_topology, kv_sizes
from ..topologies.machine import GPU_CEILINGS, HOST_CEILINGS, with_links
from .config import EngineConfig
from .known_links import recall
from .kv_layout import step_limits

log = logging.getLogger(__name__)


def auto_topology(
    config: EngineConfig,
    footprint: ModelFootprint,
    *,
    gpus: tuple[int, ...] | None,
    cores: int,
    host_bytes: int,
    fixed: bool,
) -> Topology:
    """Return the topology to run, and log in one or two lines why.

    Args:
        config: with `max_model_len` filled in.
        footprint: of the model as it will be held.
        gpus: memory of each; None on a CPU.
        cores: that this process can keep busy.
        host_bytes: memory that all ranks on a CPU together may use.
        fixed: `max_model_len` was asked for, and has to fit.

    Raises:
        TopologyError: nothing fits; one line with the nearest layout and the fix.
    """
    cache, limits = config.cache, step_limits(config)
    measured = recall("cpu" if gpus is None else "cuda")
    if gpus is None:
        # One host is one domain; its ranks divide memory, cores and bandwidth.
        machine = Machine(
            num_devices=cores,
            memory_bytes=host_bytes,
            domain_size=cores,
            ceilings=with_links(HOST_CEILINGS, measured),
            has_measured_links=measured is not None,
            is_shared=True,
            unit="core",
        )
    else:
        machine = Machine(
            num_devices=len(gpus),
            memory_bytes=int(min(gpus) * cache.gpu_memory_utilization),
            domain_size=len(gpus),
            ceilings=with_links(GPU_CEILINGS, measured),
            has_measured_links=measured is not None,
            unit="GPU",
        )
    kv_bytes = cache.kv_cache_memory_bytes
    if cache.num_blocks is not None:
        kv_bytes = kv_sizes.kv_bytes(footprint.kv_groups, limits, cache.num_blocks)
    choice = choose_topology(
        footprint, machine, limits, least_model_len=limits.max_model_len if fixed else None, kv_bytes=kv_bytes
    )
    for line in choice.reasons:
        log.info("%s", line)
    return choice.topology
