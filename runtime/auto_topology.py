"""`--topology auto`: what this machine is, in the terms of `topologies.choose_topology`, and its answer, logged.

Not the choice itself (topologies/choice.py): it knows options and devices, that one knows neither.
Units: bytes, tokens, logical CPUs.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

from ..topologies import (
    AUTO,
    Machine,
    ModelFootprint,
    Topology,
    TopologyError,
    choose_topology,
    kv_sizes,
    parse_topology,
)
from ..topologies.exchange_choice import ExchangeFacts
from ..topologies.machine import GPU_CEILINGS, HOST_CEILINGS, divided
from .config import EngineConfig, ParallelOptions
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
    machine = machine_of(config, gpus=gpus, cores=cores, host_bytes=host_bytes)
    kv_bytes = cache.kv_cache_memory_bytes
    if cache.num_blocks is not None:
        kv_bytes = kv_sizes.kv_bytes(footprint.kv_groups, limits, cache.num_blocks)
    choose = partial(
        choose_topology,
        footprint,
        machine,
        limits,
        least_model_len=limits.max_model_len if fixed else None,
        kv_bytes=kv_bytes,
    )
    try:
        choice = choose()
    except TopologyError:
        widest = max((atp for atp, _ in footprint.attention_shares if atp <= machine.num_devices), default=1)
        if widest == 1:
            raise
        choice = choose(most_atp=widest)
        log.info("--topology auto: no rank can hold all heads, so %d ranks divide them", choice.topology.atp)
    for line in choice.reasons:
        log.info("%s", line)
    return choice.topology


def machine_of(config: EngineConfig, *, gpus: tuple[int, ...] | None, cores: int, host_bytes: int) -> Machine:
    """Return this machine, with round numbers for what nobody measured; arguments as in `auto_topology`."""
    parallel = config.parallel
    facts = ExchangeFacts(
        device=parallel.device,
        as_threads=parallel.ranks == "threads",
        asked=parallel.exchange,
        payload=parallel.exchange_payload,
    )
    links = recall(parallel.device)
    if gpus is not None:
        return Machine(
            num_devices=len(gpus),
            memory_bytes=int(min(gpus) * config.cache.gpu_memory_utilization),
            domain_size=len(gpus),
            ceilings=GPU_CEILINGS,
            has_measured_links=bool(links),
            exchange=facts,
            links=links,
            unit="GPU",
        )
    emulated = emulated_domains(parallel)
    if emulated is not None:
        places = emulated.num_ranks
        return Machine(
            num_devices=places,
            memory_bytes=max(1, host_bytes // places),
            domain_size=max(emulated.domains),
            ceilings=divided(HOST_CEILINGS, places),
            has_measured_links=bool(links),
            exchange=facts,
            links=links,
            domains=emulated.domains,
            rate=emulated.rate,
            delay=emulated.delay,
            unit="place",
        )
    # One host is one domain; its ranks divide memory, cores and bandwidth.
    return Machine(
        num_devices=cores,
        memory_bytes=host_bytes,
        domain_size=cores,
        ceilings=HOST_CEILINGS,
        has_measured_links=bool(links),
        exchange=facts,
        links=links,
        is_shared=True,
        unit="core",
    )


def emulated_domains(parallel: ParallelOptions) -> Topology | None:
    """Return one group over all places of a host that emulates domains: as they are named, else as its topology does.

    Raises:
        TopologyError: they are named and make no sense.
    """
    if parallel.domains is not None:
        return domains_of(parallel.domains)
    if parallel.topology.strip().lower() == AUTO:
        return None
    topology = parse_topology(parallel.topology)
    if len(topology.domains) < 2:
        return None
    places = topology.num_ranks
    return replace(topology, ep=places, dp=1, adp=places, atp=1, red=0, domains=topology.domains * topology.dp)


def domains_of(text: str) -> Topology:
    """Return one group over the places of `2+2,rate=100,delay=20`.

    Raises:
        TopologyError: names the text and what is allowed.
    """
    sizes = text.partition(",")[0].split("+")
    try:
        if not all(size.strip().isdigit() and len(size.strip()) <= 4 for size in sizes):
            raise TopologyError("write the sizes of two domains or more, like 2+2, and perhaps ,rate=100,delay=20")
        found = parse_topology(f"EP{sum(map(int, sizes))}DP1[domains={text}]")
        if len(found.domains) < 2 or len(set(found.domains)) > 1:
            raise TopologyError("name at least two domains, all of one size")
        if (found.adp, found.red) != (found.ep, 0):
            raise TopologyError("only rate and delay may follow")
    except TopologyError as error:
        raise TopologyError(f"domains={text!r} is not allowed: {error}") from None
    return found
