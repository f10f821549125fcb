"""Metrics of the ranks of one replica, from the statistics that its engine sends.

Not the requests' side (runtime/metrics/export.py). Counters are exported as they come; ratios are taken over a moving
window of one to two minutes, so that a scrape needs no state of its own.
Units: bytes, seconds, tokens, blocks; ratios are fractions.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...moe.wide_ep.balancing import SlotWindow
from ...telemetry import COMPONENTS, PHASES, SCOPES, RankCounters
from ..messages import RankStats, Ready, Stats
from .saturation import expert_imbalance, memory_bytes, saturation
from .stats import decode_counters

WINDOW_S = 60.0
Sample = tuple[str, tuple[str, ...], float]


class ReplicaMetrics:
    """The latest numbers of one replica.

    Args:
        replica: its number, a label.
    """

    def __init__(self, replica: int) -> None:
        self.replica = replica
        self.ready: Ready | None = None
        self.stats: Stats | None = None
        self.ranks: list[RankStats] = []
        self.counters: list[RankCounters] = []
        self._baseline: list[RankCounters] = []  # where the window begins
        self._mark: list[RankCounters] = []  # where the next one will
        self._mark_time = 0.0
        self.slots = SlotWindow(span_s=WINDOW_S, parts=1)  # of all ranks, side by side

    def observe(self, stats: Stats, now: float) -> None:
        """Take newer statistics; `now` is monotonic seconds."""
        self.stats = stats
        if not stats.ranks:
            return
        self.ranks = list(stats.ranks)
        self.counters = [decode_counters(rank) for rank in stats.ranks]
        self._observe_slots(now)
        if not self._mark_time:
            self._mark_time = now
        elif now - self._mark_time >= WINDOW_S:
            self._baseline, self._mark, self._mark_time = self._mark, self.counters, now

    def ceiling(self, rank: int) -> float:
        """Return the reading speed of a rank, bytes/s; 0 when unknown.

        All ranks read together when it was measured, so each has an equal share of what they reached: what one got
        more than another is chance of a busy machine, and ranks could not be compared.
        """
        bandwidth = self.ready.memory_bandwidth if self.ready else ()
        return sum(bandwidth) / len(bandwidth) if rank < len(bandwidth) else 0.0

    def matrix_rates(self) -> dict[str, float]:
        """Return the rate of products of a rank by number format, operations/s, equal shares as in `ceiling`."""
        rates = self.ready.matrix_rates if self.ready else ()
        common = set(rates[0]).intersection(*rates) if rates else set()
        return {name: sum(rank[name] for rank in rates) / len(rates) for name in sorted(common)}

    def saturation(self, since: list[RankCounters] | None = None) -> np.ndarray:
        """Return memory saturation, [rank, phase], since earlier counters (the start of the window when None)."""
        since = self._baseline if since is None else since
        ratios = np.zeros((len(self.counters), len(PHASES)))
        for i, counters in enumerate(self.counters):
            moved, busy = memory_bytes(counters.bytes_moved), counters.busy_seconds
            if i < len(since):
                moved, busy = moved - memory_bytes(since[i].bytes_moved), busy - since[i].busy_seconds
            ceiling = self.ceiling(self.ranks[i].rank)
            ratios[i] = [saturation(moved[p], busy[p], ceiling) for p in range(len(PHASES))]
        return ratios

    def overall_saturation(self, since: list[RankCounters]) -> float:
        """Return memory saturation over all ranks and phases since earlier counters (none: since start)."""
        moved = busy = 0.0
        for i, counters in enumerate(self.counters):
            earlier = since[i] if i < len(since) else RankCounters(0, 0)
            moved += float((memory_bytes(counters.bytes_moved) - memory_bytes(earlier.bytes_moved)).sum())
            busy += float((counters.busy_seconds - earlier.busy_seconds).sum()) * self.ceiling(self.ranks[i].rank)
        return saturation(moved, busy, 1.0)

    def samples(self) -> Iterator[Sample]:
        """Yield (name, label values, value) of every metric that has a `replica` label."""
        replica = str(self.replica)
        if self.stats is not None:
            yield "moewe_requests_running", (replica,), self.stats.num_running
            yield "moewe_requests_waiting", (replica,), self.stats.num_waiting
            yield "moewe_preemptions_total", (replica,), self.stats.num_preemptions
            for rank, running in enumerate(self.stats.running_per_rank):
                yield "moewe_rank_requests_running", (replica, str(rank)), running
        if self.ready is not None:
            for rank, held in enumerate(self.ready.weight_bytes):
                labels = (replica, str(rank))
                yield "moewe_weight_bytes", labels, held
                yield "moewe_memory_bandwidth_ceiling_bytes_per_second", labels, self.ceiling(rank)
                for name, rate in self.matrix_rates().items():
                    yield "moewe_matrix_rate_ceiling_operations_per_second", (*labels, name), rate
            for rank, kinds in enumerate(self.ready.weight_kinds):
                for name, held in kinds.items():
                    yield "moewe_weight_kind_bytes", (replica, str(rank), *name.split("/")), held
            for rank, pool in enumerate(self.ready.kv_bytes):
                for name, held in pool.items():
                    yield "moewe_kv_bytes", (replica, str(rank), name), held
        for stats, counters in zip(self.ranks, self.counters):
            yield from self._rank_samples(stats, counters)
        ratios = self.saturation()
        for i, stats in enumerate(self.ranks):
            for p, phase in enumerate(PHASES):
                yield "moewe_memory_saturation_ratio", (replica, str(stats.rank), phase), float(ratios[i, p])
        if self.counters:
            by_rank, by_slot = expert_imbalance(self._window_expert_tokens())
            yield "moewe_expert_imbalance_ratio", (replica, "rank"), by_rank
            yield "moewe_expert_imbalance_ratio", (replica, "slot"), by_slot

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

    def _rank_samples(self, stats: RankStats, counters: RankCounters) -> Iterator[Sample]:
        labels = (str(self.replica), str(stats.rank))
        yield "moewe_kv_blocks_used", labels, stats.used_blocks
        yield "moewe_kv_blocks", labels, stats.total_blocks
        yield "moewe_kv_usage_ratio", labels, stats.used_blocks / stats.total_blocks if stats.total_blocks else 0.0
        yield "moewe_cache_resident", labels, float(stats.cache_resident)
        yield "moewe_expert_tokens_total", labels, float(counters.expert_tokens.sum())
        yield "moewe_unowned_expert_ids_total", labels, stats.unowned_ids
        for s, scope in enumerate(SCOPES):
            yield "moewe_exchange_bytes_total", (*labels, scope), float(counters.exchange_bytes[s])
            yield "moewe_exchange_seconds_total", (*labels, scope), float(counters.exchange_seconds[s])
        for p, phase in enumerate(PHASES):
            yield "moewe_steps_total", (*labels, phase), float(counters.steps[p])
            yield "moewe_batch_tokens_total", (*labels, phase), float(counters.tokens[p])
            yield "moewe_busy_seconds_total", (*labels, phase), float(counters.busy_seconds[p])
            for c, component in enumerate(COMPONENTS):
                if counters.bytes_moved[p, c]:
                    amount = float(counters.bytes_moved[p, c])
                    yield "moewe_memory_bytes_total", (*labels, phase, component), amount
