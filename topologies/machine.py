"""What ranks can be placed on: places, memory, what one of them can do, and what is known of the links between them.

Not a look at the machine (runtime/auto_topology.py brings the facts) and not a choice. Figures that nobody measured are
orders of magnitude. Units: bytes, bytes/s, FLOP/s, ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .cost import Ceilings, Link
from .exchange_choice import ExchangeFacts
from .exchange_cost import BETWEEN, WITHIN, ExchangeCost, LayoutLink
from .footprint import ModelFootprint
from .grid import RankGrid
from .spec import Topology, TopologyError

# Orders of magnitude, where nobody measured: a GPU with its links, and one host's memory, shared by all of its ranks.
GPU_CEILINGS = Ceilings(
    memory_bandwidth=2e12,
    flops=4e14,
    within=Link(bandwidth=3e11, latency=1e-5),
    between=Link(bandwidth=2.5e10, latency=3e-5),
)
HOST_CEILINGS = Ceilings(
    memory_bandwidth=4e10,
    flops=1e12,
    within=Link(bandwidth=1e10, latency=2e-5),
    between=Link(bandwidth=1e9, latency=1e-4),
)

CPU_RANKS = ExchangeFacts()


def rank_ceilings(
    *,
    on_host: bool,
    num_ranks: int,
    memory_bandwidth: float | None = None,
    matrix_rate: float | None = None,
    exchange: ExchangeCost | None = None,
) -> Ceilings:
    """Return what one rank can do: as it was measured, else its part of what is assumed.

    Args:
        on_host: ranks share one host's memory and cores; else each has a GPU.
        num_ranks: of the group.
        memory_bandwidth, matrix_rate: of one rank, bytes/s and FLOP/s; None where nobody measured.
        exchange: what was measured of links, with the exchange that is used.
    """
    assumed = divided(HOST_CEILINGS, num_ranks) if on_host else GPU_CEILINGS
    return replace(
        with_links(assumed, exchange),
        memory_bandwidth=memory_bandwidth or assumed.memory_bandwidth,
        flops=matrix_rate or assumed.flops,
    )


def with_links(ceilings: Ceilings, exchange: ExchangeCost | None) -> Ceilings:
    """Return `ceilings` with links as they were measured with `exchange`, where it sent rows over them."""
    if exchange is None:
        return ceilings
    return replace(
        ceilings,
        within=exchange.link(WITHIN) or ceilings.within,
        between=exchange.link(BETWEEN) or ceilings.between,
    )


def divided(whole: Ceilings, num_ranks: int) -> Ceilings:
    """Return what each of so many ranks has of memory and arithmetic that they share."""
    return replace(whole, memory_bandwidth=whole.memory_bandwidth / num_ranks, flops=whole.flops / num_ranks)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What ranks can be placed on.

    Attributes:
        num_devices: places for ranks: GPUs, or the cores of a host.
        memory_bytes: what a rank may use on one device; with `is_shared` what all ranks together may.
        domain_size: devices whose links are fast: an NVLink domain, a host.
        ceilings: of one device; with `is_shared` memory and arithmetic are those of the host.
        is_shared: ranks divide one memory, its ceiling and the cores among them (CPU), so fewer of them may use it all.
        unit: what a device is called, e.g. `GPU`.
        has_measured_links: links among `ceilings` were measured, and are not assumed like the rest.
        exchange: what ranks run on and what was asked for, which decides how rows go.
        links: what exchanges of layouts took where somebody measured them, the newest last.
        domains: of one host that emulates several, ranks of each; then all places are used, `domain_size` is the
            largest, and layouts that span them name them.
        rate, delay: of that emulated link, as in `Topology`.
    """

    num_devices: int
    memory_bytes: int
    domain_size: int
    ceilings: Ceilings
    is_shared: bool = False
    unit: str = "device"
    has_measured_links: bool = False
    exchange: ExchangeFacts = CPU_RANKS
    links: tuple[LayoutLink, ...] = ()
    domains: tuple[int, ...] = ()
    rate: int = 0
    delay: int = 0

    def __post_init__(self) -> None:
        for name in ("num_devices", "memory_bytes", "domain_size"):
            if getattr(self, name) < 1:
                raise TopologyError(f"{name}={getattr(self, name)} is not allowed; use at least 1")

    def rank_memory(self, num_ranks: int) -> int:
        """Return what each of `num_ranks` ranks may use."""
        return self.memory_bytes // num_ranks if self.is_shared else self.memory_bytes

    def rank_ceilings(self, num_ranks: int) -> Ceilings:
        """Return the ceilings of each of `num_ranks` ranks."""
        return divided(self.ceilings, num_ranks if self.is_shared else 1)

    def placed(self, topology: Topology) -> Topology:
        """Return `topology` with the domains that its groups span, where this machine emulates them."""
        if not self.domains or topology.domains or topology.ep <= self.domain_size:
            return topology
        sizes = RankGrid(topology, self.domain_size).group_domains
        return replace(topology, domains=sizes, rate=self.rate, delay=self.delay)

    def grid(self, topology: Topology) -> RankGrid:
        """Return where ranks of `topology` stand here."""
        return RankGrid(topology, self.domain_size)


def layouts(footprint: ModelFootprint, machine: Machine, *, most_atp: int = 1) -> Iterator[Topology]:
    """Yield all layouts of one pool: GPUs are all used as far as groups divide them, a host's ranks may be fewer.

    Args:
        footprint: of the model, whose experts bound the width.
        machine: with the places.
        most_atp: widest attention tensor parallelism.
    """
    for ep in range(1, min(machine.num_devices, footprint.num_experts or 1) + 1):
        most = machine.num_devices // ep
        for dp in range(1, most + 1) if machine.is_shared else (most,):
            for atp in range(1, min(most_atp, ep) + 1):
                if ep % atp == 0:
                    yield Topology(ep=ep, dp=dp, adp=ep // atp, atp=atp)
