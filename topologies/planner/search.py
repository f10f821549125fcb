"""Every layout of a number of GPUs, what it gives at every load, and which of them nobody beats.

Not a choice for a running server (topologies/choice.py): load is free, and for each layout and batch it is worked out
what users would get. Pure. Units: seconds, tokens, GPUs; rates a second.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..spec import Topology, TopologyError
from .architecture import Architecture
from .pools import UTILIZATION, Planned, plan_pool
from .serving import MOST_BUSY, Prompts, Served, State, Workload, decode_step, prompts_of, state_apart, state_at
from .step_time import Setting, StepTime

# Sequences on an attention replica: close enough together that no layout wins by where they stand.
BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
CHUNKS = (512, 2048, 8192)
NARROW = 16
TEAMS = (1, 2, 4, 8)  # atp
# A pool for prompts is kept this busy: beyond it a prompt waits longer than it computes.
BUSY = 0.8


@dataclass(frozen=True, kw_only=True)
class Targets:
    """What users shall get at least: seconds, None where nobody cares."""

    ttft: float | None = None
    tpot: float | None = None

    def met_by(self, ttft: float, tpot: float) -> bool:
        """Whether these are within the targets."""
        return (self.ttft is None or ttft <= self.ttft) and (self.tpot is None or tpot <= self.tpot)


@dataclass(frozen=True, kw_only=True)
class Space:
    """What is searched.

    Attributes:
        models: by format of weights, the model in it.
        setting: of any layout; topology and model are replaced.
        num_gpus: that there are.
        workload: without its concurrency, which is free.
        apart: pools for prompts and for decoding as well as one pool for both.
        utilization: of a GPU's memory.
    """

    models: Mapping[str, Architecture]
    setting: Setting
    num_gpus: int
    workload: Workload
    apart: bool = True
    utilization: float = UTILIZATION


@dataclass(frozen=True, kw_only=True)
class Point:
    """One layout at one load.

    Attributes:
        layout: as --topology takes it.
        weights: format.
        served: what users get; its workload has the concurrency that this takes.
        gpu_rate: output tokens a second over all GPUs that there are, idle ones too.
        binds: what a step waits for most, or `prefill` where prompts do.
    """

    layout: str
    weights: str
    served: Served
    gpu_rate: float
    binds: str


@dataclass(frozen=True, kw_only=True)
class Searched:
    """What a search found.

    Attributes:
        best: for each layout and format the fastest point within the targets, fastest first.
        front: points that no other beats both in tokens/s of a user and in tokens/s of a GPU, slowest user first.
        num_layouts, num_points: that were worked out.
        refused: layouts that do not fit or cannot be.
        why: the last refusal.
    """

    best: tuple[Point, ...]
    front: tuple[Point, ...]
    num_layouts: int
    num_points: int
    refused: int
    why: str


def search(space: Space, targets: Targets) -> Searched:
    """Return the best point of every layout, and the Pareto front of all.

    Raises:
        TopologyError: no layout fits.
    """
    tally = _Tally()
    points: list[Point] = []
    for weights, model in space.models.items():
        points += _together(space, weights, model, tally)
        if space.apart:
            points += _apart(space, weights, model, targets, tally)
    if not points:
        raise TopologyError(f"no layout of {space.num_gpus} GPUs fits; the last that was tried: {tally.why}")
    allowed = [point for point in points if targets.met_by(point.served.ttft, point.served.tpot)]
    best: dict[tuple[str, str], Point] = {}
    for point in allowed:
        key = point.layout, point.weights
        if key not in best or point.gpu_rate > best[key].gpu_rate:
            best[key] = point
    return Searched(
        best=tuple(sorted(best.values(), key=lambda point: (-point.gpu_rate, point.served.ttft, point.layout))),
        front=pareto(allowed),
        num_layouts=tally.worked_out,
        num_points=len(points),
        refused=tally.refused,
        why=tally.why,
    )


def pareto(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the points that no other beats in both rates, slowest user first."""
    front: list[Point] = []
    for point in sorted(points, key=lambda point: (-point.served.user_rate, -point.gpu_rate)):
        if not front or point.gpu_rate > front[-1].gpu_rate:
            front.append(point)
    return tuple(reversed(front))


def widths(num_gpus: int, num_experts: int) -> list[int]:
    """Return the widths of groups to try.

    All up to NARROW; beyond, those that divide the GPUs, powers of two, and those at which the fullest rank holds an
    expert less than in any narrower group.

    Example:
        >>> widths(24, 64)[-4:]
        [15, 16, 22, 24]
    """
    tried, slots = [], num_experts + 1
    for x in range(1, min(num_gpus, max(1, num_experts)) + 1):
        fewer = -(-num_experts // x) < slots
        slots = min(slots, -(-num_experts // x))
        if x <= NARROW or num_gpus % x == 0 or x & (x - 1) == 0 or fewer:
            tried.append(x)
    return tried


class _Tally:
    """Counts what was tried."""

    def __init__(self) -> None:
        self.worked_out = self.refused = 0
        self.why = ""

    def plan(self, setting: Setting, space: Space, *, chunk: int, decodes: bool = True) -> Planned | None:
        """Return the pool, or None where it cannot be."""
        servers = setting.topology.adp * setting.topology.dp
        load = replace(space.workload, concurrency=servers * BATCHES[-1])
        try:
            planned = plan_pool(setting, load, chunk=chunk, utilization=space.utilization, decodes=decodes)
        except TopologyError as error:
            self.refused, self.why = self.refused + 1, str(error)
            return None
        self.worked_out += 1
        return planned


def _topologies(space: Space, model: Architecture) -> Iterator[Topology]:
    """Yield one group of each width, with heads divided or not, and with a spare slot on each rank or not."""
    num_experts, possible = model.footprint.num_experts, model.possible_atp()
    skewed = bool(space.setting.popularity.shares)
    for ep in widths(space.num_gpus, num_experts):
        for atp in TEAMS:
            if ep % atp == 0 and atp in possible:
                for red in (0, ep) if skewed and ep > 1 else (0,):
                    yield Topology(ep=ep, dp=1, adp=ep // atp, atp=atp, red=red)


def _together(space: Space, weights: str, model: Architecture, tally: _Tally) -> Iterator[Point]:
    """Yield the points of one pool: prompts run in chunks beside sequences that decode."""
    for group in _topologies(space, model):
        topology = replace(group, dp=space.num_gpus // group.ep)
        setting = replace(space.setting, topology=topology, model=model)
        planned = next(filter(None, (tally.plan(setting, space, chunk=chunk) for chunk in reversed(CHUNKS[:2]))), None)
        if planned is None:
            continue
        for batch in BATCHES:
            if batch > planned.pool.most_sequences:
                break
            state = state_at(planned.pool, space.workload, None, batch)
            if state.busy > MOST_BUSY:
                break
            yield _point(space, weights, topology.long(), state, batch, topology.num_ranks, topology.num_ranks)


def _apart(space: Space, weights: str, model: Architecture, targets: Targets, tally: _Tally) -> Iterator[Point]:
    """Yield the points of two pools, as many groups of each as balance them."""
    one_group = [replace(space.setting, topology=group, model=model) for group in _topologies(space, model)]
    sources = _sources(space, one_group, targets, tally)
    for setting in one_group:
        planned = tally.plan(setting, space, chunk=1)
        if planned is None:
            continue
        for batch in BATCHES:
            if batch > planned.pool.most_sequences:
                break
            step = decode_step(setting, space.workload, batch)
            found = [
                made
                for source in sources
                if (made := _balanced(space, weights, setting, step, source, batch)) is not None
            ]
            within = [point for point in found if targets.met_by(point.served.ttft, point.served.tpot)]
            if found:
                yield max(within or found, key=lambda point: point.gpu_rate)


@dataclass(frozen=True, kw_only=True)
class _Source:
    """One group that computes prompts."""

    topology: Topology
    prompts: Prompts


def _sources(space: Space, settings: Sequence[Setting], targets: Targets, tally: _Tally) -> list[_Source]:
    """Return the groups that take most prompts a GPU, and the one that takes least time for a prompt."""
    found = []
    for setting in settings:
        for chunk in CHUNKS:
            planned = tally.plan(setting, space, chunk=chunk, decodes=False)
            if planned is None:
                continue
            prompts = prompts_of(planned.pool, space.workload)
            if targets.ttft is None or prompts.service + prompts.transfer <= targets.ttft:
                found.append(_Source(topology=setting.topology, prompts=prompts))
    found.sort(key=lambda source: -source.prompts.capacity / source.topology.ep)
    fastest = sorted(found, key=lambda source: source.prompts.service)[:1]
    return found[:3] + [source for source in fastest if source not in found[:3]]


def _balanced(
    space: Space, weights: str, setting: Setting, step: StepTime, source: _Source, batch: int
) -> Point | None:
    """Return the point with most groups that decode whose prompts the rest of the GPUs can compute."""
    decode, other = setting.topology, source.topology
    alone = state_apart(step, decode.adp, space.workload, source.prompts, batch)
    needed = alone.busy / BUSY  # groups for prompts, for each group that decodes
    groups = int(space.num_gpus / (decode.ep + needed * other.ep))
    while groups > 0 and groups * decode.ep + max(1, math.ceil(groups * needed)) * other.ep > space.num_gpus:
        groups -= 1
    if groups < 1:
        return None
    sources = max(1, math.ceil(groups * needed))
    state = state_apart(step, decode.adp * groups, space.workload, source.prompts.times(sources), batch)
    own, others = replace(decode, dp=groups), replace(other, dp=sources)
    layout = f"prefill: {others.long()} | decode: {own.long()}"
    return _point(space, weights, layout, state, batch, own.num_ranks + others.num_ranks, own.num_ranks)


def _point(
    space: Space, weights: str, layout: str, state: State, batch: float, num_gpus: int, decode_gpus: int
) -> Point:
    in_system = state.requests * (state.ttft + space.workload.osl * state.tpot)
    served = Served(
        ttft=state.ttft,
        tpot=state.tpot,
        waiting=state.waiting,
        batch=batch,
        chunk=state.chunk,
        requests=state.requests,
        step=state.step,
        num_gpus=num_gpus,
        decode_gpus=decode_gpus,
        limit="concurrency",
        workload=replace(space.workload, concurrency=max(1, round(in_system))),
    )
    return Point(
        layout=layout,
        weights=weights,
        served=served,
        gpu_rate=served.output_rate / space.num_gpus,
        binds="prefill" if state.waiting > state.ttft / 2 else state.step.binds,
    )
