"""`choose_topology`: which EPxDPy suits a machine and a checkpoint, and why; a pure function behind `--topology auto`.

Not a planner: it tries every layout of one pool with one simple ranking, and knows no load (advisor/ does).

The ranking: (1) what does not fit the memory is out; (2) KV that holds a sequence of COMFORT tokens, or the model's
length if that is less, before KV that holds only shorter ones; (3) groups inside a domain, or across links that were
measured, before groups across others; (4) most tokens per second of decode by the advisor's forecast
(advisor/forecast.py), where a gain below MARGIN counts as none; (5) no device left idle (where ranks share a host:
fewest ranks), then the narrowest group, then the least atp.
Units: bytes, tokens, ranks, seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from .advisor.forecast import forecast, link_figure
from .budget import ByteBudget, byte_budget, check_fits, format_bytes
from .cost import StepCost, Workload
from .footprint import ModelFootprint
from .grid import RankGrid
from .kv_sizes import StepLimits
from .machine import Machine, layouts
from .spec import Topology, TopologyError

AUTO = "auto"
COMFORT = 4096
MARGIN = 0.02
# Rows of a step on each device, and tokens in KV of each sequence, where nobody says what the load will be.
ROWS, CONTEXT = 16, 2048


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
    crosses_unknown: bool  # a link between domains that nobody measured

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
    divides = dict(footprint.attention_shares)
    candidates = [
        _candidate(footprint, topology, machine, limits, load, kv_bytes)
        for topology in map(machine.placed, layouts(footprint, machine, most_atp=most_atp))
        if topology.atp == 1 or not divides or topology.atp in divides
    ]
    fitting = [one for one in candidates if one.fits and one.longest >= (least_model_len or 2)]
    if not fitting:
        raise _nothing_fits(candidates, machine, least_model_len)
    comfort = min(COMFORT, limits.max_model_len)
    roomy = [one for one in fitting if one.longest >= comfort] or _longest(fitting)
    inside = [one for one in roomy if not one.crosses_unknown] or roomy
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


def _candidate(
    footprint: ModelFootprint, topology: Topology, machine: Machine, limits: StepLimits, load: Workload, kv: int | None
) -> _Candidate:
    memory = machine.rank_memory(topology.num_ranks)
    link = link_figure(machine, topology)
    return _Candidate(
        budget=byte_budget(footprint, topology, limits, rank_memory_bytes=memory, kv_bytes=kv),
        cost=forecast(footprint, topology, load, machine),
        crosses_unknown=topology.ep > machine.domain_size and not (link is not None and link.is_measured),
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
    if best.crosses_unknown:
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
