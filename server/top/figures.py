"""From two readings of a server to the figures that a person looks at: rates, saturation by component, latencies.

Not a view and not a connection: pure arithmetic over what /metrics counts (docs/metrics.md).
Units: tokens/s, seconds; saturation and usage are fractions (1.0 is the ceiling, or all of it).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ...runtime.metrics.cost import KINDS, cost_of, per_million
from ...topologies.advisor.records import CHANGE
from .scrape import Reading

# What a step fetches from memory, in the order of the bars; docs/metrics.md says why exchange and activations are not.
MEMORY_COMPONENTS = ("routed", "shared", "attention", "dense", "kv")
_COUNTERS = ("moewe_generation_tokens_total", "moewe_steps_total", "moewe_prompt_tokens_total")


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """One rank between two readings.

    Attributes:
        replica, rank: its labels.
        domain: its NVLink domain; None where the server did not say.
        components: share of the ceiling by component; their sum is `saturation`.
        busy: share of the time between the readings that steps took.
        cache_resident: the saturation says nothing about memory; the verdict holds.
        kv_usage: used over existing KV blocks.
        memory: bytes by part, as `moewe_rank_memory_bytes` has them; empty where the server does not say.
        running: requests.
        bound: what binds steps, where the server says it.
    """

    replica: int
    rank: int
    domain: int | None
    components: Mapping[str, float]
    saturation: float
    busy: float
    cache_resident: bool
    kv_usage: float
    memory: Mapping[str, float]
    running: int
    bound: str | None


@dataclass(frozen=True, kw_only=True)
class ServerFigures:
    """One server between two readings; a latency or rate that nothing happened for is None.

    Attributes:
        ttft_p50, ttft_p95: seconds to the first token.
        tpot_p50, tpot_p95: seconds a token after the first, as means of requests that ended.
        itl_p50, itl_p95: seconds between a token and the one before it.
        imbalance: rows of the fullest over the mean rank, the worst of all replicas.
        link_bytes: bytes/s that ranks send inside and between domains.
        price_per_hour: of the server, where it was told one.
        cost_per_million_tokens: between the readings: all of the price over tokens of `prompt`, `output`, or `all`.
        hottest: experts with the most tokens, as the server lists them.
        advice: what its advisor says of the layout; empty where it says nothing.
    """

    url: str
    version: str
    model: str
    topology: str
    ready: bool
    seconds: float
    tokens_per_second: float
    prompt_tokens_per_second: float
    ttft_p50: float | None
    ttft_p95: float | None
    tpot_p50: float | None
    tpot_p95: float | None
    itl_p50: float | None
    itl_p95: float | None
    running: int
    waiting: int
    preemptions: int
    imbalance: float | None
    link_bytes: Mapping[str, float]
    price_per_hour: float | None
    cost_per_million_tokens: Mapping[str, float | None]
    hottest: tuple[Mapping[str, Any], ...] = ()
    advice: str = ""
    ranks: tuple[RankFigures, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return asdict(self)


def restarted(earlier: Reading, later: Reading) -> bool:
    """Tell whether counters went back, so that the two readings are of two lives of a server."""
    for name in _COUNTERS:
        now = later.samples.get(name, {})
        if any(now.get(labels, 0.0) < value for labels, value in earlier.samples.get(name, {}).items()):
            return True
    return False


def quantile(buckets: Mapping[float, float], share: float) -> float | None:
    """Return the value below which `share` of the observations lie, or None without observations.

    Between two bounds observations are taken to be spread evenly; beyond the last bound it is that bound, as
    Prometheus' `histogram_quantile` does.

    Args:
        buckets: upper bound (inf is one) -> how many observations are no larger.
        share: in [0, 1].

    Example:
        >>> quantile({1.0: 5.0, 2.0: 10.0, math.inf: 10.0}, 0.75)
        1.5
    """
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    if total <= 0:
        return None
    wanted, low, below = share * total, 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= wanted and buckets[bound] > below:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (wanted - below) / (buckets[bound] - below)
        low, below = (low if math.isinf(bound) else bound), max(below, buckets[bound])
    return low


def figures(url: str, earlier: Reading, later: Reading) -> ServerFigures:
    """Return what a server did between two readings of the same life.

    Args:
        url: of the server.
        earlier, later: `earlier` was taken first.
    """
    seconds = max(later.taken - earlier.taken, 1e-9)
    info = dict(next(iter(later.samples.get("moewe_info", ())), ()))
    ratios = later.samples.get("moewe_expert_imbalance_ratio", {})
    prompt, output = (_gain(earlier, later, f"moewe_{kind}_tokens_total") for kind in ("prompt", "generation"))
    price = later.value("moewe_price_per_hour")
    price = price if price is not None and 0 < price < math.inf else None
    imbalances = [value for labels, value in ratios.items() if dict(labels).get("scope") == "rank" and value > 0]
    return ServerFigures(
        url=url,
        version=info.get("version", ""),
        model=info.get("model", ""),
        topology=info.get("topology", ""),
        ready=bool(later.value("moewe_ready")),
        seconds=seconds,
        tokens_per_second=output / seconds,
        prompt_tokens_per_second=prompt / seconds,
        ttft_p50=_latency(earlier, later, "moewe_time_to_first_token_seconds", 0.5),
        ttft_p95=_latency(earlier, later, "moewe_time_to_first_token_seconds", 0.95),
        tpot_p50=_latency(earlier, later, "moewe_time_per_output_token_seconds", 0.5),
        tpot_p95=_latency(earlier, later, "moewe_time_per_output_token_seconds", 0.95),
        itl_p50=_latency(earlier, later, "moewe_inter_token_latency_seconds", 0.5),
        itl_p95=_latency(earlier, later, "moewe_inter_token_latency_seconds", 0.95),
        running=int(later.value("moewe_requests_running") or 0),
        waiting=int(later.value("moewe_requests_waiting") or 0),
        preemptions=int(_gain(earlier, later, "moewe_preemptions_total")),
        imbalance=max(imbalances, default=None),
        link_bytes={
            scope: _gain(earlier, later, "moewe_exchange_bytes_total", scope=scope) / seconds
            for scope in ("domain", "between")
        },
        price_per_hour=price,
        cost_per_million_tokens=(
            dict.fromkeys(KINDS) if price is None else per_million(cost_of(price, seconds), prompt, output)
        ),
        hottest=tuple(item for item in _list(later.topology.get("hottest_experts")) if isinstance(item, dict)),
        advice=_advice(later.advice),
        ranks=_ranks(earlier, later, seconds),
    )


def _advice(answer: Mapping[str, Any]) -> str:
    """Return the verdict and why; nothing before the first window."""
    verdict, reason, number = answer.get("verdict"), answer.get("reason"), answer.get("number")
    if not (isinstance(verdict, str) and isinstance(reason, str) and isinstance(number, int) and number > 0):
        return ""
    to = str(answer.get("advised", "")).partition("[")[0]
    return f"{verdict} to {to}: {reason}" if verdict == CHANGE else f"{verdict}: {reason}"


def _ranks(earlier: Reading, later: Reading, seconds: float) -> tuple[RankFigures, ...]:
    domains = _domains(later.topology)
    ranks = []
    for replica, rank in sorted(
        later.by("moewe_kv_blocks", "replica", "rank"), key=lambda key: tuple(map(_number, key))
    ):
        which = {"replica": replica, "rank": rank}
        busy_s = _gain(earlier, later, "moewe_busy_seconds_total", **which)
        ceiling = later.value("moewe_memory_bandwidth_ceiling_bytes_per_second", replica=replica) or 0.0
        could_s = busy_s * ceiling
        components = {
            name: _gain(earlier, later, "moewe_memory_bytes_total", component=name, **which) / could_s
            if could_s > 0
            else 0.0
            for name in MEMORY_COMPONENTS
        }
        ranks.append(
            RankFigures(
                replica=_number(replica),
                rank=_number(rank),
                domain=domains.get((_number(replica), _number(rank))),
                components=components,
                saturation=sum(components.values()),
                busy=min(1.0, busy_s / seconds),
                cache_resident=bool(later.value("moewe_cache_resident", replica=replica)),
                kv_usage=later.value("moewe_kv_usage_ratio", **which) or 0.0,
                memory=_memory(later, which),
                running=int(later.value("moewe_rank_requests_running", **which) or 0),
                bound=_bound(later, which),
            )
        )
    return tuple(ranks)


def _bound(reading: Reading, which: Mapping[str, str]) -> str | None:
    """Return what `moewe_bound` says of a rank: the label `by` of the sample that is 1."""
    for labels, value in reading.samples.get("moewe_bound", {}).items():
        have = dict(labels)
        if value and which.items() <= have.items():
            return have.get("by")
    return None


def _memory(reading: Reading, which: Mapping[str, str]) -> dict[str, float]:
    """Return what a rank holds, by the label `part`."""
    held = reading.by("moewe_rank_memory_bytes", "replica", "rank", "part")
    return {part: value for (*labels, part), value in held.items() if labels == list(which.values())}


def _domains(topology: Mapping[str, Any]) -> dict[tuple[int, int], int]:
    found: dict[tuple[int, int], int] = {}
    for replica in _list(topology.get("replicas")):
        for rank in _list(replica.get("ranks")) if isinstance(replica, dict) else []:
            if not isinstance(rank, dict):
                continue
            which, number, domain = replica.get("replica"), rank.get("rank"), rank.get("domain")
            if isinstance(which, int) and isinstance(number, int) and isinstance(domain, int):
                found[which, number] = domain
    return found


def _gain(earlier: Reading, later: Reading, name: str, **labels: str) -> float:
    """Return by how much a counter grew; what only the later reading has began at 0."""
    return max(0.0, (later.value(name, **labels) or 0.0) - (earlier.value(name, **labels) or 0.0))


def _latency(earlier: Reading, later: Reading, name: str, share: float) -> float | None:
    before = earlier.by(f"{name}_bucket", "le")
    grown = {
        float(bound): value - before.get((bound,), 0.0) for (bound,), value in later.by(f"{name}_bucket", "le").items()
    }
    return quantile(grown, share)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0
