"""Metrics of the ranks of one replica, from the statistics that its engine sends.

Not the requests' side (runtime/metrics/export.py). Counters are exported as they come; ratios and verdicts are taken
over a moving window of one to two minutes, so that a scrape needs no state of its own.
Units: bytes, operations, seconds, tokens, blocks; ratios are fractions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from ...moe.wide_ep.balancing import SlotWindow
from ...telemetry import COMPONENTS, MEMORY_PARTS, PHASES, SCOPES, RankCounters
from ..messages import Ready, Stats
from ..rank_stats import BalanceStats, RankStats
from .bound import (
    BOUNDS,
    EFFICIENCY_BY_ISA,
    MATRIX_EFFICIENCY,
    GroupSums,
    RankCeilings,
    RankSums,
    Verdict,
    judge,
    judge_all,
)
from .dcgm import ExporterCounts, GpuReading
from .histogram import TOKEN_BOUNDS, cumulative
from .link_metrics import link_samples
from .saturation import expert_imbalance, memory_bytes, s_mbu, s_mfu
from .stats import decode_counters

WINDOW_S = 60.0
Sample = tuple[str, tuple[str, ...], float]
# Steps of the last phase, `idle`, only empty batches: no rows, bytes or operations are theirs.
_WORKING = PHASES[:-1]
# What moves on links is counted by scope (moewe_exchange_bytes_total).
_HELD_COMPONENTS = tuple(name for name in COMPONENTS if name != "exchange")
_FLOP_COMPONENTS = ("attention", "routed", "shared", "dense", "kv")
_BYTE_FORMATS = ("int8", "int4")  # multiplied as int8 numbers


@dataclass(frozen=True, kw_only=True)
class _Reading:
    """What was known at a time: counters by rank, and seconds of all requests together since the first reading."""

    time: float
    counters: list[RankCounters] = field(default_factory=list)
    waiting_seconds: float = 0.0
    running_seconds: float = 0.0


class ReplicaMetrics:
    """The latest numbers of one replica.

    Args:
        replica: its number, a label.

    Attributes:
        verdicts: what binds each rank, by position; empty where a ceiling is not known.
        overall: what binds the replica.
    """

    def __init__(self, replica: int) -> None:
        self.replica = replica
        self._forget(None)

    def _forget(self, ready: Ready | None) -> None:
        self.ready = ready
        self.stats: Stats | None = None
        self.ranks: list[RankStats] = []
        self.counters: list[RankCounters] = []
        self.verdicts: list[Verdict] = []
        self.overall: Verdict | None = None
        self._began: float | None = None
        self._latest: _Reading | None = None
        self._baseline: _Reading | None = None  # where the window begins
        self._mark: _Reading | None = None  # where the next one will
        self.slots = SlotWindow(span_s=WINDOW_S, parts=1)  # of all ranks, side by side
        self._exporter = ExporterCounts(() if ready is None else ready.gpus)

    def begin(self, ready: Ready, now: float) -> None:
        """Take what an engine says when it is ready; whatever was before it, another one counted."""
        self._forget(ready)
        self._began = now
        self._latest = self._baseline = _Reading(time=now)

    def observe(self, stats: Stats, now: float) -> None:
        """Take newer statistics; `now` is monotonic seconds."""
        earlier, before = self._latest, self.stats
        self.stats = stats
        if not stats.ranks:
            return
        self.ranks = list(stats.ranks)
        self.counters = [decode_counters(rank) for rank in stats.ranks]
        self._observe_slots(now)
        reading = _Reading(time=now, counters=self.counters)
        if earlier is not None and before is not None:
            passed = now - earlier.time
            reading = _Reading(
                time=now,
                counters=self.counters,
                waiting_seconds=earlier.waiting_seconds + passed * before.num_waiting,
                running_seconds=earlier.running_seconds + passed * before.num_running,
            )
        self._latest = reading
        if self._baseline is None:
            self._baseline = _Reading(time=now)
        if self._mark is None:
            self._mark = reading
        elif now - self._mark.time >= WINDOW_S:
            self._baseline, self._mark = self._mark, reading
        self._judge()

    def observe_exporter(self, readings: Mapping[str, GpuReading], now: float) -> bool:
        """Take what a DCGM exporter says; return whether it knows any GPU of this replica."""
        counted = [float(memory_bytes(counters.bytes_moved).sum()) for counters in self.counters]
        self._exporter.observe(readings, counted, now)
        return self._exporter.knows(readings)

    @property
    def ceiling(self) -> float:
        """The reading speed of a rank, bytes/s; 0 when unknown.

        All ranks read together when it was measured, so each has an equal share of what they reached: what one got
        more than another is chance of a busy machine, and ranks could not be compared.
        """
        bandwidth = self.ready.memory_bandwidth if self.ready else ()
        return sum(bandwidth) / len(bandwidth) if bandwidth else 0.0

    def matrix_rates(self) -> dict[str, float]:
        """Return the rate of products of a rank by number format, operations/s, equal shares as in `ceiling`."""
        rates = self.ready.matrix_rates if self.ready else ()
        common = set(rates[0]).intersection(*rates) if rates else set()
        return {name: sum(rank[name] for rank in rates) / len(rates) for name in sorted(common)}

    @property
    def matrix_rate(self) -> float:
        """The rate that bounds this model's products, operations/s: of int8 where most weights are int8 or int4."""
        kinds = self.ready.weight_kinds if self.ready else ()
        held, small = 0, 0
        for name, num_bytes in (item for rank in kinds for item in rank.items()):
            held += num_bytes
            small += num_bytes if name.split("/")[-1] in _BYTE_FORMATS else 0
        rates = self.matrix_rates()
        bf16 = rates.get("bfloat16", 0.0)
        return rates.get("int8", bf16) if 2 * small > held else bf16  # a GPU dequantises them

    def ceilings(self) -> RankCeilings | None:
        """Return what a rank can do at best; None where something is not known."""
        bandwidth, matrix_rate = self.ceiling, self.matrix_rate
        if bandwidth <= 0 or matrix_rate <= 0:
            return None
        resident = any(rank.cache_resident for rank in self.ranks)
        return RankCeilings(
            memory_bandwidth=bandwidth,
            matrix_rate=matrix_rate,
            matrix_efficiency=EFFICIENCY_BY_ISA.get(self.ready.isa if self.ready else "", MATRIX_EFFICIENCY),
            cache_resident=resident,
        )

    def saturation(self) -> np.ndarray:
        """Return S-MBU in the window, [rank, phase]."""
        moved, busy = self._gains("bytes_moved"), self._gains("busy_seconds")
        return np.array([[s_mbu(*sums, self.ceiling) for sums in zip(memory_bytes(m), b)] for m, b in zip(moved, busy)])

    def compute_saturation(self) -> np.ndarray:
        """Return S-MFU in the window, [rank, phase]."""
        flops, busy, rate = self._gains("flops"), self._gains("busy_seconds"), self.matrix_rate
        return np.array([[s_mfu(*sums, rate) for sums in zip(f.sum(axis=1), b)] for f, b in zip(flops, busy)])

    def overall_saturation(self, since: list[RankCounters]) -> float:
        """Return memory saturation over all ranks and phases since earlier counters (none: since start)."""
        moved = busy = 0.0
        for i, counters in enumerate(self.counters):
            earlier = since[i] if i < len(since) else RankCounters(0, 0)
            moved += float((memory_bytes(counters.bytes_moved) - memory_bytes(earlier.bytes_moved)).sum())
            busy += float((counters.busy_seconds - earlier.busy_seconds).sum()) * self.ceiling
        return s_mbu(moved, busy, 1.0)

    def sums(self) -> GroupSums:
        """Return what ranks and requests did in the window."""
        first, last = self._baseline, self._latest
        if first is None or last is None:
            return GroupSums(wall_seconds=0.0, ranks=())
        busy, host, starved = (self._gains(f"{name}_seconds") for name in ("busy", "host", "starved"))
        moved, flops, collectives = self._gains("bytes_moved"), self._gains("flops"), self._gains("exchange_seconds")
        return GroupSums(
            wall_seconds=last.time - first.time,
            ranks=tuple(
                RankSums(
                    busy_seconds=float(busy[i].sum()),
                    host_seconds=float(host[i].sum()),
                    collective_seconds=float(collectives[i][1:].sum()),
                    waited_seconds=self._gain("waited_seconds", i),
                    starved_seconds=float(starved[i].sum()),
                    memory_bytes=float(memory_bytes(moved[i]).sum()),
                    flops=float(flops[i].sum()),
                )
                for i in range(len(self.counters))
            ),
            waiting_seconds=last.waiting_seconds - first.waiting_seconds,
            running_seconds=last.running_seconds - first.running_seconds,
        )

    def _model_error(self, i: int) -> float:
        """Return by how much more bytes a rank counted in the window than its hardware; 0 where that saw none."""
        measured = self._gain("measured_bytes", i)
        counted = float(memory_bytes(self._gains("bytes_moved")[i]).sum())
        return counted / measured - 1 if measured > 0 else 0.0

    def _gain(self, name: str, i: int) -> float:
        """Return by how much a single counter of a rank grew in the window."""
        since = self._baseline.counters if self._baseline is not None else []
        now, before = getattr(self.counters[i], name), getattr(since[i], name) if i < len(since) else 0.0
        return float(now - before if before <= now else now)

    def _gains(self, name: str) -> list[np.ndarray]:
        """Return by how much an array of counters grew in the window, by rank; what began anew is taken from 0."""
        since = self._baseline.counters if self._baseline is not None else []
        now = [getattr(counters, name) for counters in self.counters]
        before = [getattr(counters, name) for counters in since[: len(now)]]
        before += [np.zeros_like(values) for values in now[len(before) :]]
        return [np.where(values < earlier, values, values - earlier) for values, earlier in zip(now, before)]

    def _judge(self) -> None:
        ceilings = self.ceilings()
        if ceilings is None:
            self.verdicts, self.overall = [], None
            return
        self.verdicts = judge(self.sums(), ceilings, [verdict.bound for verdict in self.verdicts])
        self.overall = judge_all(self.verdicts, self.overall.bound if self.overall is not None else None)

    def samples(self) -> Iterator[Sample]:
        """Yield (name, label values, value) of every metric that has a `replica` label."""
        replica = str(self.replica)
        if self.stats is not None:
            yield "moewe_requests_running", (replica,), self.stats.num_running
            yield "moewe_requests_waiting", (replica,), self.stats.num_waiting
            yield "moewe_preemptions_total", (replica,), self.stats.num_preemptions
            for rank, running in enumerate(self.stats.running_per_rank):
                yield "moewe_rank_requests_running", (replica, str(rank)), running
            if self.stats.balance is not None:
                yield from self._balance_samples(self.stats.balance)
        if self.ready is not None:
            yield "moewe_memory_bandwidth_ceiling_bytes_per_second", (replica,), self.ceiling
            for name, rate in self.matrix_rates().items():
                yield "moewe_matrix_rate_ceiling_operations_per_second", (replica, name), rate
            for rank, slots in enumerate(self.ready.expert_slots):
                yield "moewe_expert_slots", (replica, str(rank)), slots
            for name, held in _added_up(self.ready.weight_kinds).items():
                yield "moewe_weight_kind_bytes", (replica, *name.split("/")), held
            for name, held in _added_up(self.ready.kv_bytes).items():
                yield "moewe_kv_bytes", (replica, name), held
            if self.ready.links is not None:
                yield from link_samples(replica, self.ready.links)
        for stats, counters in zip(self.ranks, self.counters):
            yield from self._rank_samples(stats, counters)
        if self.ranks:
            yield "moewe_cache_resident", (replica,), float(any(rank.cache_resident for rank in self.ranks))
        memory, compute = self.saturation(), self.compute_saturation()
        for i, stats in enumerate(self.ranks):
            for p, phase in enumerate(_WORKING):
                yield "moewe_memory_saturation_ratio", (replica, str(stats.rank), phase), float(memory[i, p])
                yield "moewe_compute_saturation_ratio", (replica, str(stats.rank), phase), float(compute[i, p])
        yield from self._bound_samples()
        if self.counters:
            by_rank, by_slot = expert_imbalance(self._window_expert_tokens())
            yield "moewe_expert_imbalance_ratio", (replica, "rank"), by_rank
            yield "moewe_expert_imbalance_ratio", (replica, "slot"), by_slot

    def step_tokens(self) -> tuple[list[tuple[str, float]], float] | None:
        """Return buckets and sum of the rows of steps, all ranks together; None before the engine said any."""
        if self.stats is None or not self.stats.step_tokens:
            return None
        return cumulative(TOKEN_BOUNDS, self.stats.step_tokens), float(self.stats.num_step_tokens)

    def _balance_samples(self, balance: BalanceStats) -> Iterator[Sample]:
        replica = str(self.replica)
        for outcome, rounds in (("moved", balance.rounds - balance.taken_back), ("taken_back", balance.taken_back)):
            yield "moewe_balance_rounds_total", (replica, outcome), rounds
        yield "moewe_balance_rounds_total", (replica, "failed"), balance.failures
        yield "moewe_balance_moves_total", (replica,), balance.moves
        yield "moewe_balance_move_seconds_total", (replica,), balance.move_seconds
        yield "moewe_balance_gain_seconds", (replica, "predicted"), balance.predicted_seconds
        yield "moewe_balance_gain_seconds", (replica, "realised"), balance.realised_seconds
        yield "moewe_balance_gain_seconds", (replica, "clocked"), balance.clocked_seconds

    def _observe_slots(self, now: float) -> None:
        """Put the slots of all ranks side by side, once all have counted."""
        if len({counters.num_moe_layers for counters in self.counters}) > 1:
            return  # some rank has not run yet
        decode = np.concatenate([counters.expert_decode_tokens for counters in self.counters], axis=1)
        every = np.concatenate([counters.expert_tokens for counters in self.counters], axis=1)
        self.slots.observe(now, {"decode": decode, "prefill": every - decode})

    def _window_expert_tokens(self) -> list[np.ndarray]:
        """Return what the slots of each rank got in the window."""
        bounds = np.cumsum([counters.num_local_slots for counters in self.counters])[:-1]
        return np.split(self.slots.tokens(), bounds, axis=1)

    def _bound_samples(self) -> Iterator[Sample]:
        replica = str(self.replica)
        if self._began is not None and self._latest is not None:
            yield "moewe_wall_seconds_total", (replica,), self._latest.time - self._began
        if (ceilings := self.ceilings()) is not None:
            yield "moewe_ridge_point_operations_per_byte", (replica,), ceilings.ridge_point
        moved, flops = self._gains("bytes_moved"), self._gains("flops")
        for p, phase in enumerate(_WORKING if moved else ()):
            touched = float(sum(memory_bytes(values)[p] for values in moved))
            intensity = float(sum(values[p].sum() for values in flops)) / touched if touched > 0 else 0.0
            yield "moewe_arithmetic_intensity_operations_per_byte", (replica, phase), intensity
        for i, (stats, counters) in enumerate(zip(self.ranks, self.counters)):
            labels = (replica, str(stats.rank))
            if counters.measured_bytes:  # the rank's own counter is nearer than an exporter's
                yield "moewe_measured_memory_bytes_total", labels, counters.measured_bytes
                yield "moewe_model_error_ratio", labels, self._model_error(i)
            elif measured := self._exporter.measured_bytes(stats.rank):
                yield "moewe_measured_memory_bytes_total", labels, measured
                yield "moewe_model_error_ratio", labels, self._exporter.model_error(stats.rank)
            if joules := counters.joules or self._exporter.joules(stats.rank):
                yield "moewe_gpu_energy_joules_total", labels, joules
        for stats, verdict in zip(self.ranks, self.verdicts):
            yield "moewe_bound", (replica, str(stats.rank), verdict.bound), 1.0
        if self.overall is not None:
            for name in BOUNDS:
                yield "moewe_bound_share_ratio", (replica, name), self.overall.shares[name]

    def _rank_samples(self, stats: RankStats, counters: RankCounters) -> Iterator[Sample]:
        labels = (str(self.replica), str(stats.rank))
        yield "moewe_kv_blocks_used", labels, stats.used_blocks
        yield "moewe_kv_blocks", labels, stats.total_blocks
        yield "moewe_kv_usage_ratio", labels, stats.used_blocks / stats.total_blocks if stats.total_blocks else 0.0
        for part, held in zip(MEMORY_PARTS, stats.memory):
            yield "moewe_rank_memory_bytes", (*labels, part), held
        yield "moewe_expert_tokens_total", labels, float(counters.expert_tokens.sum())
        yield "moewe_unowned_expert_ids_total", labels, stats.unowned_ids
        timed = counters.exchange_seconds.any()  # the host's clock says nothing about a GPU
        for s, scope in enumerate(SCOPES):
            yield "moewe_exchange_bytes_total", (*labels, scope), float(counters.exchange_bytes[s])
            if timed:
                yield "moewe_exchange_seconds_total", (*labels, scope), float(counters.exchange_seconds[s])
        yield "moewe_host_seconds_total", labels, float(counters.host_seconds.sum())
        yield "moewe_starved_seconds_total", labels, float(counters.starved_seconds.sum())
        for component in _FLOP_COMPONENTS:
            flops = float(counters.flops[:, COMPONENTS.index(component)].sum())
            yield "moewe_matrix_operations_total", (*labels, component), flops
        for p, phase in enumerate(PHASES):
            yield "moewe_steps_total", (*labels, phase), float(counters.steps[p])
            yield "moewe_busy_seconds_total", (*labels, phase), float(counters.busy_seconds[p])
        for p, phase in enumerate(_WORKING):
            yield "moewe_batch_tokens_total", (*labels, phase), float(counters.tokens[p])
            for component in _HELD_COMPONENTS:
                if amount := float(counters.bytes_moved[p, COMPONENTS.index(component)]):
                    yield "moewe_memory_bytes_total", (*labels, phase, component), amount


def _added_up(ranks: Iterable[Mapping[str, int]]) -> Mapping[str, int]:
    """Return the sums over ranks by name, in the order in which names come."""
    total: Counter[str] = Counter()
    for rank in ranks:
        total.update(rank)
    return total
