"""What tokens cost: a price an hour, the time that it runs, and the tokens that were served meanwhile.

Not a bill and not a price list: one number that the operator gives for a whole server, loading and idle time included.
Units: money in whatever currency the price is in; seconds; tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

from .metric import Metric

KINDS = ("prompt", "output", "all")
_MILLION, _HOUR_S = 1e6, 3600.0

COST_METRICS = (
    Metric(
        "moewe_price_per_hour", "gauge", (), "money/hour",
        "What the whole server costs, all replicas and ranks: `--price-per-hour`. Nothing of cost is shown without it.",
        "Nothing: it is what you pay.",
    ),
    Metric(
        "moewe_cost_total", "counter", (), "money",
        "The price times the time since the server began to load; idle time costs as well.",
        "Nothing: it is a clock in money.",
    ),
    Metric(
        "moewe_cost_per_million_tokens", "gauge", ("tokens",), "money/million tokens",
        "All of the cost since start over the tokens of one kind: `prompt`, `output`, or `all` (both). Each carries "
        "the whole cost, so they do not add up. Nothing before the first such token.",
        "The server is idle for much of its time, or few requests run at once: put more load on it, or pay for fewer "
        "ranks. Its panel shows the cost at the load of an interval beside it.",
    ),
)  # fmt: skip


def cost_of(price_per_hour: float, seconds: float) -> float:
    """Return what `seconds` cost."""
    return price_per_hour * seconds / _HOUR_S


def per_million(cost: float, prompt_tokens: float, output_tokens: float) -> dict[str, float | None]:
    """Return the cost of a million tokens of each of KINDS, None where there were none of them.

    Example:
        >>> per_million(2.0, 3_000_000, 1_000_000)
        {'prompt': 0.6666666666666666, 'output': 2.0, 'all': 0.5}
    """
    counts = (prompt_tokens, output_tokens, prompt_tokens + output_tokens)
    return {kind: cost / count * _MILLION if count > 0 else None for kind, count in zip(KINDS, counts)}


def cost_samples(
    price_per_hour: float, seconds: float, prompt_tokens: int, output_tokens: int
) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Yield (name, labels, value) of each metric above.

    Args:
        price_per_hour: of the server.
        seconds: since it began to load.
        prompt_tokens, output_tokens: served since.
    """
    cost = cost_of(price_per_hour, seconds)
    yield "moewe_price_per_hour", (), price_per_hour
    yield "moewe_cost_total", (), cost
    for kind, value in per_million(cost, prompt_tokens, output_tokens).items():
        if value is not None:
            yield "moewe_cost_per_million_tokens", (kind,), value
