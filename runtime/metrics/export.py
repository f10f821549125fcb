"""What happened to requests and inside the ranks, as Prometheus reads it.

Not the counting inside ranks (telemetry) and not the names (runtime/metrics/table.py). One object a server process;
one thread writes. Requests are counted where clients are served, so the numbers are those that clients see.
Units: seconds of the monotonic clock, tokens, bytes.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from ...telemetry import HostEnergy, peak_of
from ..messages import Delta, Ready, Stats
from .advice_metrics import AdviceMetrics
from .compat import Distribution, foreign_families
from .cost import cost_samples
from .dcgm import GpuReading
from .histogram import TOKEN_BOUNDS, Histogram
from .ranks import ReplicaMetrics
from .table import BY_NAME

REASONS = ("stop", "length", "abort", "error")
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_REQUEST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 25.0, 50.0, 100.0, 250.0, 600.0)


@dataclass
class RequestTimes:
    """The life of one accepted prompt; made by `Metrics.submitted`."""

    num_prompt_tokens: int
    submitted: float
    first_scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    num_tokens: int = 0
    finished: bool = False


@dataclass
class Totals:
    """Counters of requests since start."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    errors: Counter[int] = field(default_factory=Counter)


class Metrics(Collector):
    """All metrics of a server process.

    Args:
        version, model, topology: labels of `moewe_info`.
        compat: a key of `compat.STYLES`: the same figures under the names of another server, too.
        price_per_hour: of the server, from now on; None shows no cost.
        energy: counters of the host; made here unless given.
    """

    def __init__(
        self,
        *,
        version: str,
        model: str,
        topology: str,
        compat: str | None = None,
        price_per_hour: float | None = None,
        energy: HostEnergy | None = None,
    ) -> None:
        self._info = (version, model, topology)
        self._compat = compat
        self._price_per_hour = price_per_hour
        self._began, self._began_at = time.monotonic(), time.time()
        self._energy = HostEnergy() if energy is None else energy
        self.ready = False
        self.totals = Totals()
        self.replicas: dict[int, ReplicaMetrics] = {}
        self.advice = AdviceMetrics()
        self._histograms = {
            "moewe_time_to_first_token_seconds": Histogram(_REQUEST_BUCKETS),
            "moewe_time_per_output_token_seconds": Histogram(_TOKEN_BUCKETS),
            "moewe_inter_token_latency_seconds": Histogram(_TOKEN_BUCKETS),
            "moewe_request_duration_seconds": Histogram(_REQUEST_BUCKETS),
            "moewe_queue_time_seconds": Histogram(_REQUEST_BUCKETS),
            "moewe_prefill_time_seconds": Histogram(_REQUEST_BUCKETS),
            "moewe_decode_time_seconds": Histogram(_REQUEST_BUCKETS),
            "moewe_request_prompt_tokens": Histogram(TOKEN_BOUNDS),
            "moewe_request_generation_tokens": Histogram(TOKEN_BOUNDS),
        }
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def submitted(self, num_prompt_tokens: int) -> RequestTimes:
        """Note that a prompt was handed to an engine."""
        return RequestTimes(num_prompt_tokens=num_prompt_tokens, submitted=time.monotonic())

    def observe(self, times: RequestTimes, delta: Delta) -> None:
        """Note what a delta brought for a request."""
        if times.finished:
            return
        now = time.monotonic()
        if not times.first_scheduled and delta.first_scheduled > 0:
            times.first_scheduled = delta.first_scheduled
            self._histograms["moewe_queue_time_seconds"].observe(delta.first_scheduled - times.submitted)
        if delta.token_ids:
            self._observe_tokens(times, len(delta.token_ids), now)
        if delta.finish_reason is not None:
            self.finished(times, delta.finish_reason, now)

    def _observe_tokens(self, times: RequestTimes, count: int, now: float) -> None:
        if times.num_tokens == 0:
            self._histograms["moewe_time_to_first_token_seconds"].observe(now - times.submitted)
            self.totals.prompt_tokens += times.num_prompt_tokens
            times.first_token = now
        else:
            self._histograms["moewe_inter_token_latency_seconds"].observe((now - times.last_token) / count, count)
        times.last_token = now
        times.num_tokens += count
        self.totals.generation_tokens += count

    def finished(self, times: RequestTimes, reason: str, now: float | None = None) -> None:
        """Note the end of a request, once; `reason` is one of REASONS."""
        if times.finished:
            return
        times.finished = True
        if times.num_tokens == 0 and reason in ("stop", "length"):  # nothing but the prompt was asked
            self.totals.prompt_tokens += times.num_prompt_tokens
        self.totals.finished[reason] += 1
        self._histograms["moewe_request_duration_seconds"].observe((now or time.monotonic()) - times.submitted)
        self._histograms["moewe_request_prompt_tokens"].observe(times.num_prompt_tokens)
        self._histograms["moewe_request_generation_tokens"].observe(times.num_tokens)
        if times.num_tokens:
            self._histograms["moewe_prefill_time_seconds"].observe(times.first_token - times.first_scheduled)
            self._histograms["moewe_decode_time_seconds"].observe(times.last_token - times.first_token)
        if times.num_tokens > 1 and reason in ("stop", "length"):
            mean = (times.last_token - times.first_token) / (times.num_tokens - 1)
            self._histograms["moewe_time_per_output_token_seconds"].observe(mean)

    def error(self, status: int) -> None:
        """Note an error answer of a generating route."""
        self.totals.errors[status] += 1

    def set_ready(self, replica: int, ready: Ready) -> None:
        """Note what a replica said when it was ready."""
        self._replica(replica).begin(ready, time.monotonic())

    def observe_stats(self, replica: int, stats: Stats) -> None:
        """Note the latest statistics of a replica; they come at least once a second."""
        self._energy.read()
        self._replica(replica).observe(stats, time.monotonic())

    def move_to(self, topology: str) -> None:
        """Forget the replicas of the layout that ran: another one runs from now on."""
        self._info = (*self._info[:2], topology)
        self.replicas.clear()

    def observe_exporter(self, readings: Mapping[str, GpuReading]) -> bool:
        """Note what a DCGM exporter says; return whether it knows any of our GPUs."""
        now = time.monotonic()
        return any([replica.observe_exporter(readings, now) for replica in self.replicas.values()])

    def _replica(self, replica: int) -> ReplicaMetrics:
        return self.replicas.setdefault(replica, ReplicaMetrics(replica))

    def render(self) -> bytes:
        """Return the Prometheus text form."""
        return generate_latest(self._registry)

    def _samples(self) -> Iterator[tuple[str, tuple[str, ...], float]]:
        if self._price_per_hour is not None:
            seconds, totals = time.monotonic() - self._began, self.totals
            yield from cost_samples(self._price_per_hour, seconds, totals.prompt_tokens, totals.generation_tokens)
        for replica in sorted(self.replicas):
            yield from self.replicas[replica].samples()
        yield from self.advice.samples()

    def _all_histograms(self) -> Mapping[str, list[Distribution]]:
        found: dict[str, list[Distribution]] = {
            name: [((), each.cumulative(), each.total)] for name, each in self._histograms.items()
        }
        for replica in sorted(self.replicas):
            if (steps := self.replicas[replica].step_tokens()) is not None:
                found.setdefault("moewe_step_tokens", []).append(((str(replica),), *steps))
        return found

    def describe(self) -> Iterable[Metric]:
        """Nothing is described ahead of collection."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Yield every family of the table that has values."""
        values: dict[str, list[tuple[tuple[str, ...], float]]] = {
            "moewe_info": [(self._info, 1.0)],
            "moewe_ready": [((), float(self.ready))],
            "moewe_start_time_seconds": [((), self._began_at)],
            "moewe_requests_finished_total": [((r,), self.totals.finished[r]) for r in REASONS],
            "moewe_request_errors_total": [((str(s),), n) for s, n in sorted(self.totals.errors.items())],
            "moewe_prompt_tokens_total": [((), self.totals.prompt_tokens)],
            "moewe_generation_tokens_total": [((), self.totals.generation_tokens)],
        }
        if joules := self._energy.joules():
            values["moewe_host_energy_joules_total"] = [((zone,), used) for zone, used in joules.items()]
        pids = [pid for replica in self.replicas.values() if replica.ready is not None for pid in replica.ready.pids]
        if (peak := peak_of([os.getpid(), *pids])) is not None:  # an engine is the parent of its ranks
            values["moewe_peak_memory_bytes"] = [((), peak)]
        for name, labels, value in self._samples():
            values.setdefault(name, []).append((labels, value))
        histograms = self._all_histograms()
        for metric in BY_NAME.values():
            if metric.name in histograms:
                family = HistogramMetricFamily(metric.name, metric.meaning, labels=metric.labels)
                for labels, buckets, total in histograms[metric.name]:
                    family.add_metric(labels, buckets, total)
                yield family
            elif metric.name in values:
                make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                plain = make(metric.name, metric.meaning, labels=metric.labels)
                for labels, value in values[metric.name]:
                    plain.add_metric(labels, value)
                yield plain
        if self._compat is not None:
            yield from foreign_families(self._compat, self._info[1], values, histograms)
