"""What to measure of the links of a group before it serves, one probe after another, and what follows from the figures.

Not the measuring (moe/probing.py) and no clock: a generator that asks for probes and is sent what all ranks found.
Exchanges are fitted as seconds = fixed + bytes within the domain * a + bytes between domains * b; experts as seconds =
bytes of those hit * c + operations * d; and how much of an exchange can run under experts is the part with which the
model of a layer (overlap_choice.py) comes nearest to what halves in turns took.
Units: seconds, bytes, FLOP; rows of one rank.
"""

from __future__ import annotations

import statistics
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .cost import ExpertSpeed
from .exchange_choice import OVER_LINKS
from .exchange_cost import BETWEEN, WITHIN, ExchangeCost, MeasuredLinks, rows_sent
from .overlap_choice import HALVES, NOTHING, SHARED, OverlapFacts, layer_seconds

# Where the rows of a probe go: to anybody, to the own domain, to others; or through whole layers.
ANYWHERE, NEAR, FAR, LAYERS = "anywhere", "near", "far", "layers"
# What is timed: an exchange and nothing else, the experts of a layer; whole layers go by the name of their overlap.
EXCHANGE, EXPERTS = "exchange", "experts"
# Seconds in which all probes of a group should be through; the part of them for exchanges alone.
BUDGET_S = 0.6
_EXCHANGES_SHARE = 0.3
# So much longer, in parts of all that, an exchange over slow links may take until its bytes tell: what is assumed
# instead is most wrong there.
_PATIENCE = 2.0
_REPEATS, _LEAST_REPEATS = 4, 2
# Sizes of probes of an exchange, bytes of rows: they grow until bytes take more than what is fixed.
_LEAST_BYTES, _MOST_BYTES, _GROWTH = 32 << 10, 64 << 20, 8
# Rows of probes of layers, of each the first size that fits, and with which power of the rows experts are expected to
# slow down: few rows wait for all weights as many do.
_LAYER_ROWS: tuple[tuple[tuple[int, ...], float], ...] = (((16,), 1.0), ((256, 64), 0.4), ((1024,), 1.0))
_HIDDEN_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class LinkProbe:
    """What all ranks do together, `repeats` times.

    Attributes:
        exchange: name of the one to use.
        rows: of each rank.
        what: ANYWHERE, NEAR or FAR: rows and answers of an exchange without experts, by where they go; LAYERS: whole
            MoE layers.
        repeats: at least 1.
        overlaps: of LAYERS, how they run, in turns.
    """

    exchange: str
    rows: int
    what: str
    repeats: int
    overlaps: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RankFound:
    """What one rank found.

    Attributes:
        seconds: of each repeat, by what was timed.
        near_bytes, far_bytes: sent in one exchange within the domain and between domains.
        expert_bytes, expert_flops: of experts that were hit and their rows in one layer, where EXPERTS were timed.
    """

    seconds: dict[str, tuple[float, ...]]
    near_bytes: float = 0.0
    far_bytes: float = 0.0
    expert_bytes: float = 0.0
    expert_flops: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Found:
    """What all ranks found together; attributes as in `RankFound`, and how long the probe took."""

    seconds: dict[str, float]
    near_bytes: float
    far_bytes: float
    expert_bytes: float
    expert_flops: float
    took_s: float


def found_by(ranks: Sequence[RankFound], took_s: float) -> Found:
    """Return what `ranks` found together: seconds of the slowest rank in the best turn (what else runs only adds to
    them), of experts of the mean rank; mean bytes.
    """
    seconds = {}
    for name in ranks[0].seconds:
        turns = zip(*(rank.seconds[name] for rank in ranks), strict=True)
        seconds[name] = min(statistics.mean(turn) if name == EXPERTS else max(turn) for turn in turns)

    def mean(name: str) -> float:
        return float(statistics.mean(getattr(rank, name) for rank in ranks))

    return Found(
        seconds=seconds,
        near_bytes=mean("near_bytes"),
        far_bytes=mean("far_bytes"),
        expert_bytes=mean("expert_bytes"),
        expert_flops=mean("expert_flops"),
        took_s=took_s,
    )


Probing = Generator[LinkProbe, Found, MeasuredLinks]


def probe_links(names: Sequence[str], facts: OverlapFacts, *, most_rows: int, budget_s: float = BUDGET_S) -> Probing:
    """Ask for probes until enough is known or `budget_s` is used up; return what follows.

    Args:
        names: of the exchanges that the group has joined.
        facts: of the group, with a load; what is assumed there stands where too little could be measured.
        most_rows: of a rank in a step.
        budget_s: one probe for each exchange is made even where it is nothing, and no probe begins that is not expected
            to end within it, but of slow links those that tell what bytes cost.
    """
    spent = took_s = 0.0
    costs = []
    for i, name in enumerate(names):
        share = budget_s * _EXCHANGES_SHARE * (i + 1) / len(names) - spent
        patience_s = _PATIENCE * budget_s / len(names)
        samples = yield from _probe_exchange(name, facts, most_rows, share, patience_s)
        took = sum(found.took_s for found in samples)
        took_s += took
        spent += min(max(share, 0.0), took)  # patience is not at the cost of what comes after
        costs.append(fit_exchange(name, samples, facts))
    layers: dict[str, list[tuple[int, Found]]] = {}
    for i, cost in enumerate(costs):
        left = (budget_s - spent) / (len(costs) - i)
        layers[cost.name] = yield from _probe_layers(cost, facts, most_rows, left)
        took = sum(found.took_s for _, found in layers[cost.name])
        took_s, spent = took_s + took, spent + took
    experts = fit_experts([found for probed in layers.values() for _, found in probed])
    links = MeasuredLinks(exchanges=tuple(costs), experts=experts, took_s=took_s)
    known = replace(facts, measured=links)
    return replace(links, exchanges=tuple(_with_hidden(cost, layers[cost.name], known) for cost in costs))


def _probe_exchange(
    name: str, facts: OverlapFacts, most_rows: int, budget_s: float, patience_s: float
) -> Generator[LinkProbe, Found, list[Found]]:
    """Probe one row, then more and more of them on each kind of way until their bytes tell."""
    assert facts.load is not None
    domains = facts.grid.group_domains
    repeats = _LEAST_REPEATS if budget_s > 0 else 1
    first = yield LinkProbe(exchange=name, rows=1, what=ANYWHERE, repeats=repeats)
    samples, left = [first], budget_s - first.took_s
    # What is done for the first time may be slow.
    if (repeats := _repeats(left / 4, first.seconds[EXCHANGE])) > 0:
        again = yield LinkProbe(exchange=name, rows=1, what=ANYWHERE, repeats=repeats)
        first = min(first, again, key=lambda found: found.seconds[EXCHANGE])
        samples, left = [first], left - again.took_s
    ways = [FAR] * (len(domains) > 1) + [NEAR] * (max(domains) > 1)
    fixed_s = first.seconds[EXCHANGE]
    for i, way in enumerate(ways):
        share, patience = left / (len(ways) - i), patience_s / len(ways)
        rows, expected_s = max(2, _LEAST_BYTES // facts.load.row_bytes), 2 * fixed_s
        while rows <= most_rows and rows * facts.load.row_bytes <= _MOST_BYTES:
            repeats = _repeats(share, expected_s) or _LEAST_REPEATS * (patience >= _LEAST_REPEATS * expected_s)
            if repeats < 1:
                break
            found = yield LinkProbe(exchange=name, rows=rows, what=way, repeats=repeats)
            samples.append(found)
            patience -= max(0.0, found.took_s - max(0.0, share))
            share, left = share - found.took_s, left - found.took_s
            took_s = found.seconds[EXCHANGE]
            if took_s > 4 * fixed_s:
                break
            if took_s > 2 * fixed_s:  # bytes have told: as if it were all bytes; less is likely, but more is not
                patience, expected_s = 0.0, _GROWTH * took_s
            else:
                expected_s = fixed_s + _GROWTH * max(took_s - fixed_s, fixed_s / 4)
            rows *= _GROWTH
    return samples


def _probe_layers(
    cost: ExchangeCost, facts: OverlapFacts, most_rows: int, budget_s: float
) -> Generator[LinkProbe, Found, list[tuple[int, Found]]]:
    """Probe layers of more and more rows, in halves too where somebody may choose them."""
    overlaps = (SHARED, HALVES) if cost.name in OVER_LINKS and facts.asked == "auto" else (NOTHING,)

    def exchanges_s(rows: int) -> float:
        return len(overlaps) * _exchange_s(cost, rows, facts)

    probed: list[tuple[int, Found]] = []
    others_s, last_rows, left = 0.0, 1, budget_s  # what a turn takes beside exchanges
    for sizes, growth in _LAYER_ROWS:
        expected = {
            rows: exchanges_s(rows) + others_s * (rows / last_rows) ** growth for rows in sizes if rows <= most_rows
        }
        fitting = [(rows, repeats) for rows, seconds in expected.items() if (repeats := _repeats(left, seconds)) > 0]
        if not fitting:
            break
        rows, repeats = fitting[0]
        found = yield LinkProbe(exchange=cost.name, rows=rows, what=LAYERS, repeats=repeats, overlaps=overlaps)
        probed.append((rows, found))
        others_s = max(0.0, found.took_s / repeats - exchanges_s(rows))
        last_rows, left = rows, left - found.took_s
    return probed


def _exchange_s(cost: ExchangeCost, rows: int, facts: OverlapFacts) -> float:
    """Return how long an exchange of so many rows is expected to take."""
    assert facts.load is not None
    sent = rows_sent(cost.name, rows, facts.grid, facts.load.top_k)
    row_bytes = facts.load.row_bytes
    return cost.seconds(row_bytes * (sent.near_out + sent.near_back), row_bytes * (sent.far_out + sent.far_back))


def _repeats(left_s: float, expected_s: float) -> int:
    """Return how often something can be done in the time that is left; 0 where that is too seldom to be worth much."""
    if left_s <= 0:
        return 0
    number = _REPEATS if expected_s <= 0 else min(_REPEATS, int(left_s / expected_s))
    return number if number >= _LEAST_REPEATS else 0


def fit_exchange(name: str, samples: Sequence[Found], facts: OverlapFacts) -> ExchangeCost:
    """Return what explains the probes of an exchange best, each by its relative error; nothing in it is negative.

    Of a kind of link whose bytes do not tell, as few probes were made or others were slow, what is assumed stands.
    """
    # One row says nothing about bytes.
    tells = [any(getattr(found, name) > 0 for found in samples[1:]) for name in ("near_bytes", "far_bytes")]
    known = [[1.0, found.near_bytes * tells[0], found.far_bytes * tells[1]] for found in samples]
    fixed, near, far = _fit(known, [found.seconds[EXCHANGE] for found in samples])
    assumed: list[str] = []
    if max(facts.grid.group_domains) > 1 and not near:
        near = 1 / facts.ceilings.within.bandwidth
        assumed.append(WITHIN)
    if facts.grid.spans_domains and not far:
        far = 1 / facts.ceilings.between.bandwidth
        assumed.append(BETWEEN)
    return ExchangeCost(name=name, fixed_s=fixed, within_s=near, between_s=far, assumed=tuple(assumed))


def fit_experts(samples: Sequence[Found]) -> ExpertSpeed | None:
    """Return what explains the times of experts best; None where weights and rows cannot be told apart."""
    timed = [found for found in samples if found.seconds.get(EXPERTS, 0.0) > 0 and found.expert_bytes > 0]
    intensity = [found.expert_flops / found.expert_bytes for found in timed]
    if len(timed) < 2 or max(intensity) < 2 * min(intensity):
        return None
    byte_s, flop_s = _fit(
        [[found.expert_bytes, found.expert_flops] for found in timed], [found.seconds[EXPERTS] for found in timed]
    )
    return ExpertSpeed(byte_s=byte_s, flop_s=flop_s)


def _with_hidden(cost: ExchangeCost, probed: Sequence[tuple[int, Found]], facts: OverlapFacts) -> ExchangeCost:
    """Return `cost` with the part that experts hide, by what halves took longer or shorter than whole layers."""
    compared = [(rows, found.seconds) for rows, found in probed if rows > 1 and HALVES in found.seconds]
    if not compared:
        return cost

    def error(hidden: float) -> float:
        guess = replace(cost, hidden=hidden)
        known = replace(facts, measured=replace(facts.measured, exchanges=(guess,)))
        wrong = 0.0
        for rows, seconds in compared:
            first = -(-rows // 2)
            whole, halves = (layer_seconds(cost.name, parts, known) for parts in ((rows,), (first, rows - first)))
            wrong += ((halves - whole - seconds[HALVES] + seconds[SHARED]) / seconds[SHARED]) ** 2
        return wrong

    return replace(cost, hidden=min((i / _HIDDEN_STEPS for i in range(_HIDDEN_STEPS + 1)), key=error))


def _fit(known: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return the factors, none below 0, with which `known` [n, m] comes nearest to `seconds` [n], relative to them."""
    matrix = np.asarray(known, np.float64) / np.asarray(seconds, np.float64)[:, None]
    scale = np.abs(matrix).max(0)
    factors = np.zeros(matrix.shape[1])
    used = np.flatnonzero(scale > 0)
    while used.size:
        found = np.linalg.lstsq(matrix[:, used] / scale[used], np.ones(len(matrix)), rcond=None)[0]
        if found.min() >= 0:
            factors[used] = found / scale[used]
            break
        used = np.delete(used, found.argmin())
    return [float(factor) for factor in factors]
