"""What all replicas did in a window, as the advisor wants to be told: means of steps, taken from counters.

Not the advisor (topologies/advisor/) and not the window of gauges (runtime/metrics/ranks.py). One object a layout; it
is told of every reading and asked at the end of each window.
Units: seconds, bytes, operations; means over ranks and steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ...telemetry import COMPONENTS, PHASES, RankCounters
from ...topologies import Topology
from ...topologies.advisor.records import Observation, PhaseSeen
from ...topologies.planner.routing import measured, placed_imbalance
from .bound import BOUNDS, IDLE
from .ranks import ReplicaMetrics

_ROUTED, _KV = COMPONENTS.index("routed"), COMPONENTS.index("kv")
_OTHERS = [COMPONENTS.index(name) for name in ("attention", "shared", "dense")]
_DIGITS = 6  # of popularity: a log of windows need not hold more


class ObservedWindow:
    """Readings of the replicas of one layout.

    Args:
        topology: of the layout.
        block_size: tokens of a KV block.
        now: seconds of a monotonic clock.
        widest: ranks of the widest group that the machine has places for, whichever runs.
    """

    def __init__(self, topology: Topology, block_size: int, now: float, *, widest: int) -> None:
        self._topology, self._block_size, self._widest = topology, block_size, widest
        self._begin(now)

    def _begin(self, now: float, counters: Mapping[int, list[RankCounters]] | None = None) -> None:
        self._began, self._before = now, dict(counters or {})
        self._samples, self._running, self._tokens = 0, 0.0, 0.0

    def begin_anew(self, replicas: Mapping[int, ReplicaMetrics], now: float) -> None:
        """Begin a window: what came before now counts no more."""
        self._begin(now, {number: each.counters for number, each in replicas.items()})

    def age(self, now: float) -> float:
        """Return how long the window is open."""
        return now - self._began

    def sample(self, replicas: Mapping[int, ReplicaMetrics]) -> None:
        """Look at what runs now; the window keeps the mean of all looks."""
        self._samples += 1
        for replica in replicas.values():
            if replica.stats is not None:
                self._running += replica.stats.num_running
                used = sum(rank.used_blocks for rank in replica.ranks)
                self._tokens += used * self._block_size / self._topology.atp

    def end(self, replicas: Mapping[int, ReplicaMetrics], loads: np.ndarray, now: float, time: float) -> Observation:
        """Return what happened and begin the next window.

        Args:
            replicas: all of them.
            loads: tokens of each expert lately [L, E]; no rows where they are not known.
            now: of the monotonic clock.
            time: Unix seconds.
        """
        gained = [
            [_gained(new, old) for new, old in zip(each.counters, self._earlier(number, each.counters))]
            for number, each in replicas.items()
        ]
        gained = [ranks for ranks in gained if ranks]
        shares = _shares(replicas)
        popularity, imbalances = _popularity(loads, self._widest)
        seen = Observation(
            time=time,
            seconds=max(0.0, now - self._began),
            phases=_phases(gained, self._topology.atp),
            **dict(zip(("link_s", "wait_s"), _collectives(gained))),
            running=self._running / max(1, self._samples),
            context=self._tokens / self._running if self._running else 0.0,
            popularity=popularity,
            imbalances=imbalances,
            shares=shares,
            bound=max(shares, key=lambda name: shares[name], default=IDLE),
            is_cached=any(rank.cache_resident for each in replicas.values() for rank in each.ranks),
        )
        self.begin_anew(replicas, now)
        return seen

    def _earlier(self, number: int, counters: Sequence[RankCounters]) -> list[RankCounters]:
        before = self._before.get(number, [])
        return before if len(before) == len(counters) else [RankCounters(0, 0) for _ in counters]


class _Gained:
    """What one rank counted in a window: arrays by phase, and seconds of collectives."""

    def __init__(self, new: RankCounters, old: RankCounters) -> None:
        self.steps = _less(new.steps, old.steps).astype(float)
        self.tokens = _less(new.tokens, old.tokens)
        self.bytes_moved = _less(new.bytes_moved, old.bytes_moved)
        self.flops = _less(new.flops, old.flops)
        starved, host = _less(new.starved_seconds, old.starved_seconds), _less(new.host_seconds, old.host_seconds)
        self.busy = _less(new.busy_seconds, old.busy_seconds) + starved
        self.host = host + starved
        self.collective = float(_less(new.exchange_seconds, old.exchange_seconds)[1:].sum())
        self.waited = max(0.0, new.waited_seconds - old.waited_seconds)


def _gained(new: RankCounters, old: RankCounters) -> _Gained:
    return _Gained(new, old)


def _less(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Return by how much counters grew; those that began anew count from 0."""
    return np.where(new < old, new, new - old)


def _phases(replicas: Sequence[Sequence[_Gained]], atp: int) -> tuple[PhaseSeen, ...]:
    found = []
    ranks = [rank for replica in replicas for rank in replica]
    for p, phase in enumerate(PHASES[:-1]):
        steps = float(sum(rank.steps[p] for rank in ranks))
        if steps <= 0:
            continue
        rows = sum(
            sum(float(rank.tokens[p]) for rank in replica) / (sum(rank.steps[p] for rank in replica) / len(replica))
            for replica in replicas
            if sum(rank.steps[p] for rank in replica) > 0
        )

        def mean(amounts: Sequence[float], steps: float = steps) -> float:
            return max(0.0, float(sum(amounts)) / steps)

        found.append(
            PhaseSeen(
                phase=phase,
                steps=steps / len(ranks),
                rows=float(rows) / atp,  # the ranks of an attention replica run the same rows
                busy_s=mean([rank.busy[p] for rank in ranks]),
                host_s=mean([rank.host[p] for rank in ranks]),
                routed_bytes=mean([rank.bytes_moved[p, _ROUTED] for rank in ranks]),
                weight_bytes=mean([rank.bytes_moved[p, _OTHERS].sum() for rank in ranks]),
                kv_bytes=mean([rank.bytes_moved[p, _KV] for rank in ranks]),
                flops=mean([rank.flops[p].sum() for rank in ranks]),
                routed_flops=mean([rank.flops[p, _ROUTED] for rank in ranks]),
            )
        )
    return tuple(found)


def _collectives(replicas: Sequence[Sequence[_Gained]]) -> tuple[float, float]:
    """Return what even the rank that waits least spent in collectives, and what others waited beyond it; means."""
    links, waits = [], []
    for ranks in replicas:
        link = min(max(0.0, rank.collective - rank.waited) for rank in ranks)
        links.append(float(link))
        waits.append(float(sum(max(0.0, rank.collective - link) for rank in ranks)) / len(ranks))
    return (sum(links) / len(links), sum(waits) / len(waits)) if links else (0.0, 0.0)


def _shares(replicas: Mapping[int, ReplicaMetrics]) -> dict[str, float]:
    verdicts = [each.overall for each in replicas.values() if each.overall is not None]
    if not verdicts:
        return {}  # no ceilings, no verdict
    return {name: float(sum(verdict.shares[name] for verdict in verdicts)) / len(verdicts) for name in BOUNDS}


def _popularity(loads: np.ndarray, widest: int) -> tuple[tuple[float, ...], tuple[tuple[int, float], ...]]:
    """Return parts of all choices, largest first, and how full the fullest rank of each width is, experts in order."""
    loads = loads[loads.sum(axis=1) > 0] if loads.size else loads
    if not loads.size:
        return (), ()
    parts = np.sort(loads / loads.sum(axis=1, keepdims=True), axis=1)[:, ::-1].mean(axis=0)
    chances = np.asarray(measured(loads).shares)
    widths = range(2, min(widest, loads.shape[1]) + 1)
    return (
        tuple(round(float(part), _DIGITS) for part in parts),
        tuple((ranks, round(max(1.0, placed_imbalance(chances, ranks)), _DIGITS)) for ranks in widths),
    )
