"""When requests leave: a Poisson process, a burstier or steadier one, or all at once.

Not the sending (server/bench/load.py). Units: seconds after the start, requests/s.
"""

from __future__ import annotations

import math

import numpy as np


def arrival_times(number: int, rate: float, *, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Return when each of `number` requests leaves; the first at 0.

    Args:
        rate: requests/s on average; infinity sends all at once.
        burstiness: shape of the gamma distribution of the gaps: 1 is Poisson, below 1 is burstier, above 1 steadier.
        seed: same seed, same times.
    """
    if not rate > 0:
        raise ValueError(f"--request-rate {rate:g} is not allowed; use a number above 0, or inf")
    if not (burstiness > 0 and math.isfinite(burstiness)):
        raise ValueError(f"--burstiness {burstiness:g} is not allowed; use a number above 0, 1 for a Poisson process")
    if math.isinf(rate) or number == 0:
        return [0.0] * number
    gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / (rate * burstiness), number - 1)
    return [0.0, *np.cumsum(gaps).tolist()]
