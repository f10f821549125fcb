"""`choose_topology`: which EPxDPy suits a machine and a checkpoint, and why; a pure function behind `--topology auto`.

Not a planner: it tries every layout of one pool with one simple ranking. Its interface stays when the ranking does not.

The ranking: (1) what does not fit the memory is out; (2) KV that holds a sequence of COMFORT tokens, or the model's
length if that is less, before KV that holds only shorter ones; (3) groups inside a domain before groups across them;
(4) most tokens per second of decode by the cost model (cost.py), where a gain below MARGIN counts as none; (5) no
device left idle (where ranks share a host: fewest ranks), then the narrowest group, then the least atp.
Units: bytes, tokens, ranks, seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .budget import ByteBudget, byte_budget, check_fits, format_bytes
from .cost import Ceilings, Link, StepCost, Workload, step_cost
from .exchange_cost import BETWEEN, WITHIN, ExchangeCost
from .footprint import ModelFootprint
from .grid import RankGrid
from .kv_sizes import StepLimits
from .spec import Topology, TopologyError

AUTO = "auto"
COMFORT = 4096
MARGIN = 0.02
# Rows of a step on each device, and tokens in KV of each sequence, where nobody says what the load will be.
ROWS, CONTEXT = 16, 2048
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
    assumed = _divided(HOST_CEILINGS, num_ranks) if on_host else GPU_CEILINGS
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


def _divided(whole: Ceilings, num_ranks: int) -> Ceilings:
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
    """

    num_devices: int
    memory_bytes: int
    domain_size: int
    ceilings: Ceilings
    is_shared: bool = False
    unit: str = "device"
    has_measured_links: bool = False

    def __post_init__(self) -> None:
        for name in ("num_devices", "memory_bytes", "domain_size"):
            if getattr(self, name) < 1:
                raise TopologyError(f"{name}={getattr(self, name)} is not allowed; use at least 1")

    def rank_memory(self, num_ranks: int) -> int:
        """Return what each of `num_ranks` ranks may use."""
        return self.memory_bytes // num_ranks if self.is_shared else self.memory_bytes

    def rank_ceilings(self, num_ranks: int) -> Ceilings:
        """Return the ceilings of each of `num_ranks` ranks."""
        return _divided(self.ceilings, num_ranks if self.is_shared else 1)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A topology and what speaks for it.

    Attributes:
        topology: x, y and atp.
        domains: ranks of each domain.
        cost: of a decode step under the assumed load.
        reasons: one or two lines.
    """

    topology: Topology
    domains: tuple[tuple[int, ...], ...]
    cost: StepCost
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    budget: ByteBudget
    cost: StepCost
    spans: bool

    @property
    def topology(self) -> Topology:
        return self.budget.topology

    @property
    def fits(self) -> bool:
        return self.budget.total <= self.budget.rank_memory_bytes and self.longest > 1

    @property
    def longest(self) -> int:
        return self.budget.longest_sequence


def choose_topology(
    footprint: ModelFootprint,
    machine: Machine,
    limits: StepLimits,
    *,
    workload: Workload | None = None,
    least_model_len: int | None = None,
    kv_bytes: int | None = None,
    most_atp: int = 1,
) -> Choice:
    """Return the layout that suits `footprint` on `machine`.

    Args:
        footprint: what the checkpoint weighs.
        machine: what there is.
        limits: of a step and a sequence.
        workload: of decode steps; None takes ROWS rows a device with CONTEXT tokens each.
        least_model_len: a sequence of so many tokens must fit; None asks for no more than two.
        kv_bytes: KV of a rank that was asked for; None takes what is left.
        most_atp: widest attention tensor parallelism that may be chosen.

    Raises:
        TopologyError: nothing fits; it names the nearest layout, what it lacks, and a fix.
    """
    load = workload or Workload(rows=ROWS * (1 if machine.is_shared else machine.num_devices), context=CONTEXT)
    candidates = [
        _candidate(footprint, topology, machine, limits, load, kv_bytes)
        for topology in _topologies(footprint, machine, most_atp)
    ]
    fitting = [one for one in candidates if one.fits and one.longest >= (least_model_len or 2)]
    if not fitting:
        raise _nothing_fits(candidates, machine, least_model_len)
    comfort = min(COMFORT, limits.max_model_len)
    roomy = [one for one in fitting if one.longest >= comfort] or _longest(fitting)
    inside = [one for one in roomy if not one.spans] or roomy
    fastest = max(one.cost.tokens_per_second for one in inside)
    near = [one for one in inside if one.cost.tokens_per_second >= fastest * (1 - MARGIN)]
    sign = 1 if machine.is_shared else -1
    best = min(near, key=lambda one: (sign * one.topology.num_ranks, one.topology.ep, one.topology.atp))
    grid = RankGrid(best.topology, machine.domain_size)
    domains: list[list[int]] = [[] for _ in range(grid.num_domains)]
    for rank in range(best.topology.num_ranks):
        domains[grid.coords(rank).domain].append(rank)
    return Choice(
        topology=best.topology,
        domains=tuple(map(tuple, domains)),
        cost=best.cost,
        reasons=(
            _room(best, machine, len(domains)),
            _speed(best, [one for one in inside if one is not best], machine),
        ),
    )


def _topologies(footprint: ModelFootprint, machine: Machine, most_atp: int) -> Iterator[Topology]:
    """Yield all layouts of one pool: GPUs are all used as far as groups divide them, a host's ranks may be fewer."""
    for ep in range(1, min(machine.num_devices, footprint.num_experts or 1) + 1):
        most = machine.num_devices // ep
        for dp in range(1, most + 1) if machine.is_shared else (most,):
            for atp in range(1, min(most_atp, ep) + 1):
                if ep % atp == 0:
                    yield Topology(ep=ep, dp=dp, adp=ep // atp, atp=atp)


def _candidate(
    footprint: ModelFootprint, topology: Topology, machine: Machine, limits: StepLimits, load: Workload, kv: int | None
) -> _Candidate:
    memory = machine.rank_memory(topology.num_ranks)
    ceilings = machine.rank_ceilings(topology.num_ranks)
    return _Candidate(
        budget=byte_budget(footprint, topology, limits, rank_memory_bytes=memory, kv_bytes=kv),
        cost=step_cost(footprint, topology, load, ceilings, domain_size=machine.domain_size),
        spans=topology.ep > machine.domain_size,
    )


def _longest(fitting: list[_Candidate]) -> list[_Candidate]:
    most = max(one.longest for one in fitting)
    return [one for one in fitting if one.longest == most]


def _room(best: _Candidate, machine: Machine, num_domains: int) -> str:
    """Say what it takes and where it stands."""
    topology, budget = best.topology, best.budget
    devices = _count(machine.num_devices, machine.unit)
    used = f"{_count(topology.num_ranks, 'rank')} on {devices}" if machine.is_shared else (
        f"{topology.num_ranks} of {devices}"
    )  # fmt: skip
    where = f"{used}, {_count(num_domains, 'domain')}"
    if best.spans:
        where += f" (no group within a domain of {machine.domain_size} holds the model)"
    return (
        f"--topology auto: {topology.short()}, {where}; a rank holds {format_bytes(budget.of_kind('weights'))} of "
        f"weights and {format_bytes(budget.kv_bytes)} of KV, and may use {format_bytes(budget.rank_memory_bytes)}"
    )


def _speed(best: _Candidate, others: list[_Candidate], machine: Machine) -> str:
    """Say why it and not the next one; `others` fit, and none of them is preferred for its memory or its domains."""
    if not others:
        return "--topology auto: no other layout fits as well"
    other = max(others, key=lambda one: one.cost.tokens_per_second)
    ours, theirs = best.cost, other.cost
    ratio = theirs.bytes_read * other.topology.num_ranks / (ours.bytes_read * best.topology.num_ranks)
    why = f"{other.topology.short()}, the next best, would read {ratio:.2f} times the bytes a step"
    share, own_share = theirs.exchange_seconds / theirs.seconds, ours.exchange_seconds / ours.seconds
    if max(share, own_share) >= 0.01:
        why += f" and spend {share:.0%} of it in exchanges ({own_share:.0%} here)"
    shared = "ranks of one host share its memory and cores; " if machine.is_shared else ""
    speed = theirs.tokens_per_second / ours.tokens_per_second
    return (
        f"--topology auto: {shared}{why}, for {speed:.2f} times the tokens per second "
        f"({ours.rows:g} rows, assumed ceilings{', measured links' if machine.has_measured_links else ''})"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


def _nothing_fits(candidates: list[_Candidate], machine: Machine, least_model_len: int | None) -> TopologyError:

    def lack(one: _Candidate) -> tuple[int, int]:
        each = one.budget.fixed_bytes - one.budget.rank_memory_bytes
        return each * (one.topology.num_ranks if machine.is_shared else 1), one.topology.num_ranks

    nearest = min(candidates, key=lack)
    try:
        check_fits(nearest.budget, host_bytes=machine.memory_bytes if machine.is_shared else None)
    except TopologyError as error:
        why = str(error)
    else:
        why = (
            f"KV of {format_bytes(nearest.budget.kv_bytes)} holds {nearest.longest:,} tokens, "
            f"less than max_model_len={least_model_len:,}; lower --max-model-len"
        )
    return TopologyError(
        f"--topology auto: no layout of up to {_count(machine.num_devices, machine.unit)} fits; nearest: {why}"
    )
