"""How long a step takes on a layout of a machine, part by part: bytes, FLOPs, links, launches.

Not a measurement and not the cost model that a running engine asks (topologies/cost.py). Every part takes its bytes and
then its arithmetic: few rows meet many small kernels, whose loads hide little. Formulas, sources: docs/planner.md.
Units: seconds, bytes, FLOPs, rows; x ranks of a group, E experts, K a row, D width; of the fullest rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ..cost import expected_hit
from ..exchange_cost import ExchangeCost
from ..kv_sizes import shared_groups
from ..spec import Topology
from .architecture import BF16, PRECISIONS, Architecture
from .exchange import attention_seconds, exchange_seconds
from .hardware import Hardware
from .routing import BALANCED, Popularity, distinct_share, placed_imbalance, random_imbalance

MEMORY, COMPUTE, LINK, LAUNCH, IMBALANCE = "memory", "compute", "link", "launch", "imbalance"


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What no data sheet says; docs/planner.md has when each was fixed, and on what.

    Attributes:
        memory_efficiency: part of the bandwidth that reading reaches: 0.8 in aiconfigurator and in InferSim.
        flops_efficiency: part of the rate that products reach: 0.6, InferSim's on H20.
        layer_seconds: of a layer beside bytes, FLOPs and exchange: launches, small kernels, waiting for the slowest.
        step_seconds: of a step beside its layers: planning, inputs, sampling, handing over.
    """

    memory_efficiency: float = 0.8
    flops_efficiency: float = 0.6
    layer_seconds: float = 93e-6
    step_seconds: float = 0.0


CONSTANTS = Constants()
# Of a host whose bandwidth and products were measured: what the small products of a step reach of a long read and of a
# large product, and what a layer takes beside both. Fitted on five steps of one model (benchmarks/planner_cpu.py).
MEASURED = Constants(memory_efficiency=0.74, flops_efficiency=0.22, layer_seconds=310e-6)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What steps have in common.

    Attributes:
        model: bytes and arithmetic.
        topology: x, y, atp and redundant slots.
        hardware: of each rank.
        popularity: of experts.
        overlap: two halves of the rows take turns, one's exchange under the other's experts.
        constants: see there.
        link: what an exchange takes, where somebody measured it, over the links that it was measured on.
    """

    model: Architecture
    topology: Topology
    hardware: Hardware
    popularity: Popularity = field(default_factory=Popularity)
    overlap: bool = False
    constants: Constants = CONSTANTS
    link: ExchangeCost | None = None

    @cached_property
    def bandwidth(self) -> float:
        """Bytes/s that a rank reads."""
        return self.hardware.memory_bandwidth * self.constants.memory_efficiency / self._sharers

    def rate(self, precision: str) -> float:
        """FLOP/s of a rank."""
        return self._rates[precision]

    @cached_property
    def _rates(self) -> dict[str, float]:
        factor = self.constants.flops_efficiency / self._sharers
        return {precision: self.hardware.flops(precision) * factor for precision in PRECISIONS}

    @cached_property
    def chances(self) -> np.ndarray:
        """The chance that a row chooses each expert of each layer [L or 1, E]."""
        footprint = self.model.footprint
        return self.popularity.inclusion(footprint.num_experts, footprint.top_k)

    def hit(self, rows: float) -> float:
        """Return the part of experts that at least one of `rows` rows chooses."""
        if self.popularity.shares:
            return distinct_share(self.chances, rows)
        return expected_hit(self.model.footprint.top_k / self.model.footprint.num_experts, rows)

    @cached_property
    def placed(self) -> float:
        """Rows of the fullest rank over the mean that placement leaves; a balancer runs where there are spare slots."""
        uneven = placed_imbalance(self.chances, self.topology.ep)
        return min(uneven, BALANCED) if self.topology.red else uneven

    @property
    def _sharers(self) -> int:
        return self.topology.num_ranks if self.hardware.is_shared else 1


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What a step does on each attention replica.

    Attributes:
        decodes: sequences that decode.
        context: tokens in KV of each.
        queries: rows of each of them: one, and one for every token that was drafted.
        chunk: rows of prompts.
        chunk_context: tokens that each of those sees on average.
    """

    decodes: float = 0.0
    context: float = 0.0
    queries: float = 1.0
    chunk: float = 0.0
    chunk_context: float = 0.0

    @property
    def total(self) -> float:
        """All rows."""
        return self.decodes * self.queries + self.chunk


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a step: what it moves, what it computes, how long it takes and what binds it.

    Of `seconds`, `computing` go into FLOPs.
    """

    name: str
    num_bytes: float
    flops: float
    seconds: float
    binds: str
    computing: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A step of the fullest rank.

    Attributes:
        parts: one after another, in order; with overlap `hidden_seconds` of them run beside others.
        hidden_seconds: see there.
        memory_limit: seconds that its weights and KV would take at the whole bandwidth of the data sheet.
    """

    parts: tuple[Part, ...]
    hidden_seconds: float
    memory_limit: float

    @property
    def seconds(self) -> float:
        """The step."""
        return sum(part.seconds for part in self.parts) - self.hidden_seconds

    @property
    def computing(self) -> float:
        """Seconds of FLOPs, in whatever part."""
        return sum(part.computing for part in self.parts)

    @property
    def saturation(self) -> float:
        """Bytes of weights and KV over time, as a part of the bandwidth of the data sheet."""
        return self.memory_limit / self.seconds

    @property
    def binds(self) -> str:
        """What most of the step waits for: memory, compute, link, launch or imbalance."""
        spent: dict[str, float] = {}
        for part in self.parts:
            hidden = self.hidden_seconds if part.binds == LINK else 0.0
            spent[part.binds] = spent.get(part.binds, 0.0) + part.seconds - hidden
        return max(spent, key=lambda kind: spent[kind])

    def part(self, name: str) -> Part:
        """Return the part called `name`."""
        return next(part for part in self.parts if part.name == name)


def step_time(setting: Setting, rows: Rows) -> StepTime:
    """Return how long a step with `rows` on each attention replica takes."""
    model, constants = setting.model, setting.constants
    footprint = model.footprint
    own = rows.total / setting.topology.atp  # behind attention, the ranks of an attention replica divide its rows
    parts = [
        _part(setting, "attention weights", footprint.attention_bytes_at(setting.topology.atp),
              2 * model.attention_numbers / setting.topology.atp * rows.total, model.attention_precision),
        _scores(setting, rows),
        _part(setting, "dense weights", footprint.dense_bytes,
              2 * (model.dense_numbers + model.router_numbers) * own, model.ffn_precision),
        _part(setting, "shared experts", footprint.shared_bytes, 2 * model.shared_numbers * own, model.ffn_precision),
        _routed(setting, own, even=True),
        _part(setting, "output head", footprint.head_bytes or footprint.embedding_bytes,
              2 * model.head_numbers * rows.decodes * rows.queries / setting.topology.atp, BF16),
    ]  # fmt: skip
    read = sum(part.num_bytes for part in parts)
    routed = parts[4].seconds
    if not setting.hardware.is_shared:  # a CPU's caches hold them
        parts.append(_part(setting, "rows between products", own * model.row_bytes, 0.0, BF16))
    products = tuple(parts)
    exchange = exchange_seconds(setting, own, is_decode=rows.chunk == 0)
    sharing = attention_seconds(setting, rows.total)
    fullest = _imbalance(setting, own)
    late = _routed(setting, own, even=False).seconds - routed + exchange.bandwidth_seconds * (fullest - 1)
    launching = constants.layer_seconds * footprint.num_layers + constants.step_seconds
    parts += [
        Part(name="exchange", num_bytes=exchange.num_bytes, flops=0, seconds=exchange.seconds, binds=LINK),
        Part(name="attention exchange", num_bytes=0, flops=0, seconds=sharing, binds=LINK),
        Part(name="imbalance", num_bytes=0, flops=0, seconds=late, binds=IMBALANCE),
        Part(name="launch", num_bytes=0, flops=0, seconds=launching, binds=LAUNCH),
    ]
    limit = read / (setting.bandwidth / constants.memory_efficiency)
    if setting.overlap and exchange.seconds:
        again = _again(setting, own)
        parts.append(Part(name="experts read twice", num_bytes=0, flops=0, seconds=again, binds=MEMORY))
        beside = sum(part.seconds for part in products) + again
        # The first dispatch and the last combine of a step have nothing to hide under.
        hidden = min(exchange.seconds * (1 - 1 / max(1, footprint.num_moe_layers)), beside)
    else:
        hidden = 0.0
    return StepTime(parts=tuple(part for part in parts if part.seconds), hidden_seconds=hidden, memory_limit=limit)


def _part(setting: Setting, name: str, num_bytes: float, flops: float, precision: str) -> Part:
    """Return products whose weights are read once, and then multiplied."""
    reading, computing = num_bytes / setting.bandwidth, flops / setting.rate(precision)
    binds = COMPUTE if computing > reading else MEMORY
    return Part(
        name=name, num_bytes=num_bytes, flops=flops, seconds=reading + computing, binds=binds, computing=computing
    )


def _scores(setting: Setting, rows: Rows) -> Part:
    """Return attention over KV: each group's tokens, no more than its window, read once for each sequence."""
    num_bytes = flops = 0.0
    groups = shared_groups(setting.model.footprint.kv_groups, setting.topology.atp)
    for group, scores in zip(groups, setting.model.scores, strict=True):
        window = group.window or float("inf")
        num_bytes += rows.decodes * min(rows.context, window) * group.bytes_per_token
        flops += rows.decodes * rows.queries * min(rows.context, window) * scores.decode_flops
        if rows.chunk:  # tiles of many rows read KV once for all of them: arithmetic binds
            flops += rows.chunk * min(rows.chunk_context, window) * scores.prefill_flops
            num_bytes += min(2 * rows.chunk_context, window) * group.bytes_per_token
    return _part(setting, "KV and scores", num_bytes, flops / setting.topology.atp, setting.model.score_precision)


def _routed(setting: Setting, own: float, *, even: bool) -> Part:
    """Return the routed experts of the fullest rank, or of the mean one."""
    footprint, topology = setting.model.footprint, setting.topology
    if not footprint.num_moe_layers:
        return Part(name="routed experts", num_bytes=0, flops=0, seconds=0, binds=MEMORY)
    fullest = 1.0 if even else _imbalance(setting, own)
    slots = (footprint.num_experts + topology.red) / topology.ep
    if not even:
        slots = math.ceil(slots)
    hit = setting.hit(own * topology.ep * fullest)
    return _part(
        setting,
        "routed experts",
        footprint.num_moe_layers * footprint.expert_bytes * slots * hit,
        2 * setting.model.expert_numbers * footprint.num_moe_layers * own * footprint.top_k * fullest,
        setting.model.ffn_precision,
    )


def _again(setting: Setting, own: float) -> float:
    """Return what it costs more to run experts for two halves of the rows, each of which reads what it hits."""
    halves = replace(setting, overlap=False)
    return max(0.0, 2 * _routed(halves, own / 2, even=True).seconds - _routed(halves, own, even=True).seconds)


def _imbalance(setting: Setting, own: float) -> float:
    """Return rows of the fullest rank over the mean: by chance, times what placement leaves."""
    footprint, ep = setting.model.footprint, setting.topology.ep
    if ep == 1 or not footprint.num_moe_layers:
        return 1.0
    return min(float(ep), setting.placed * random_imbalance(own * ep * footprint.top_k, ep))
