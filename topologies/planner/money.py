"""What a rate costs: money from a price an hour, energy from the power of a device.

Not a price list. Units: currency of the price given, joules, output tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from .serving import Served


@dataclass(frozen=True, kw_only=True)
class Cost:
    """For output tokens, prompts included in what they cost.

    Attributes:
        per_million: price of a million output tokens; None without a price.
        joules: a token; None without a power.
    """

    per_million: float | None
    joules: float | None


def cost(served: Served, *, price: float | None, watts: float | None) -> Cost:
    """Return the cost of what is served.

    Args:
        served: rates and devices.
        price: of a device for an hour.
        watts: of a device at work; idle ones take as much.
    """
    gpu_seconds = served.num_gpus / served.output_rate
    return Cost(
        per_million=None if price is None else price / 3600 * gpu_seconds * 1e6,
        joules=None if not watts else watts * gpu_seconds,
    )
