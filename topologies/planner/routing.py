"""What routing makes of many rows: experts that are hit, ranks that a row goes to, and how uneven ranks are.

Not a router and not a placement: expectations over random choices. Pure functions of counts and popularity.
Letters: E experts, K a row, x ranks of a group. Units: experts, ranks, rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from ..grid import slot_ranges

# What a balancer leaves when it has spare slots: 0.109 above the mean over ranks, EP32 with 9 slots a rank, measured
# by TensorRT-LLM on DeepSeek-R1 (its technical blog on wide expert parallelism).
BALANCED = 1.109


@dataclass(frozen=True)
class Popularity:
    """How likely a row chooses each expert of each layer: rows of `shares` sum to 1.

    One row is of all layers; none means that all experts are alike.
    """

    shares: tuple[tuple[float, ...], ...] = ()

    def inclusion(self, num_experts: int, top_k: int) -> np.ndarray:
        """Return the chance that a row chooses each expert: at most 1, in each layer `top_k` in all [L or 1, E]."""
        if not self.shares:
            return np.full((1, num_experts), top_k / num_experts)
        return np.stack([_inclusion(np.asarray(layer), num_experts, top_k) for layer in self.shares])


def _inclusion(shares: np.ndarray, num_experts: int, top_k: int) -> np.ndarray:
    assert shares.shape == (num_experts,), (shares.shape, num_experts)
    chance: np.ndarray = top_k * shares / shares.sum()
    for _ in range(num_experts):  # nobody is chosen more than once: what is above 1 goes to the others
        over = chance > 1
        if not over.any():
            break
        others = chance[~over].sum()
        rest = top_k - over.sum()
        chance = np.where(over, 1.0, chance * rest / others if others else rest / max(1, (~over).sum()))
    return chance


def measured(loads: np.ndarray) -> Popularity:
    """Return the popularity that tokens of each expert of each layer show [L, E]; a layer without any is even."""
    rows = np.where(loads.sum(axis=1, keepdims=True) > 0, loads, 1).astype(np.float64)
    return Popularity(tuple(map(tuple, (rows / rows.sum(axis=1, keepdims=True)).tolist())))


def zipf(exponent: float, num_experts: int) -> Popularity:
    """Return a popularity that falls with rank as 1 / rank ** exponent, hot experts spread over the numbers.

    aiconfigurator models popularity so, with exponents 1.01 (DeepSeek) and 1.2 (Qwen3-235B).
    """
    weights = [1.0 / (1 + number) ** exponent for number in range(num_experts)]
    order = np.random.default_rng(0).permutation(num_experts)
    shares = np.empty(num_experts)
    shares[order] = np.asarray(weights) / sum(weights)
    return Popularity((tuple(shares.tolist()),))


def distinct_share(chances: np.ndarray, rows: float) -> float:
    """Return the expected part of experts that at least one of `rows` rows chooses: mean of 1 - (1 - p_e) ** rows.

    Rows choose independently. With p = K / E it is 1 - (1 - K/E) ** rows; others (GenZ, aiconfigurator) take the upper
    bound min(1, K * rows / E).

    Example:
        >>> round(distinct_share(np.full(256, 8 / 256), 16), 3)
        0.398
    """
    if rows <= 0:
        return 0.0
    with np.errstate(divide="ignore"):
        return float(-np.expm1(rows * np.log1p(-np.minimum(chances, 1.0))).mean())


def places_hit(num_experts: float, top_k: int, places: int, *, groups: int = 1, top_groups: int = 1) -> float:
    """Return how many of `places` equal places with experts a row needs on average.

    Without groups: places * (1 - C(E - E/places, K) / C(E, K)), the chance that K different experts all miss a place.
    With groups of experts (DeepSeek-V3: 4 of 8) only those places count that hold experts of the chosen groups.

    Example:
        >>> [round(places_hit(256, 8, places), 2) for places in (8, 32, 64)]
        [5.29, 7.27, 7.68]
    """
    if places <= 1:
        return float(places)
    if groups <= 1:
        return places * (1 - _all_miss(num_experts, num_experts / places, top_k))
    candidates = num_experts * top_groups / groups
    if places > groups:  # a place holds a part of one group
        reached = top_groups * places / groups
        return reached * (1 - _all_miss(candidates, candidates / reached, top_k))
    hit = 0.0
    for chosen in range(1, top_groups + 1):  # groups of a place that the row chose
        chance = _chance_of(chosen, groups, groups // places, top_groups)
        hit += chance * (1 - _all_miss(candidates, chosen * num_experts / groups, top_k))
    return places * hit


def _chance_of(marked_drawn: int, population: int, marked: int, draws: int) -> float:
    """Return the chance that of `draws` draws without putting back so many are of `marked` things."""
    others = math.comb(population - marked, draws - marked_drawn)
    return math.comb(marked, marked_drawn) * others / math.comb(population, draws)


def _all_miss(population: float, marked: float, draws: int) -> float:
    """Return the chance that `draws` draws without putting back meet none of `marked` things of `population`."""
    chance = 1.0
    for drawn in range(draws):
        chance *= max(0.0, 1 - marked / (population - drawn))
    return chance


def random_imbalance(pairs: float, ranks: int) -> float:
    """Return how much more rows the fullest of `ranks` ranks gets than the mean, where every choice is by chance.

    A rank's rows have mean m = pairs / ranks and variance m * (1 - 1/ranks); the largest of n normal variables lies
    about F((n - 0.375) / (n + 0.25)) deviations above the mean, F the normal quantile (Blom, 1958).

    Example:
        >>> [round(random_imbalance(32 * 8 * batch, 32), 2) for batch in (4, 16, 128)]
        [1.36, 1.18, 1.06]
    """
    if ranks <= 1 or pairs <= 0:
        return 1.0
    mean = pairs / ranks
    above = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    return min(float(ranks), 1 + above * math.sqrt((1 - 1 / ranks) / mean))


def placed_imbalance(chances: np.ndarray, ranks: int) -> float:
    """Return the part of the fullest rank over the mean, where ranks hold equal runs of experts and p_e are `chances`.

    Args:
        chances: that a row chooses each expert of each layer [L or 1, E]; layers count alike.
        ranks: of a group; the first hold one expert more where they do not divide evenly.
    """
    if ranks <= 1:
        return 1.0
    starts = [start for start, stop in slot_ranges(chances.shape[1], ranks) if stop > start]
    fullest = np.add.reduceat(chances, starts, axis=1).max(axis=1)  # [L or 1]; one call, many widths are asked for
    return float((ranks * fullest / chances.sum(axis=1)).mean())


def parse_popularity(text: str, num_experts: int) -> Popularity:
    """Return what `uniform` or `zipf:EXPONENT` means.

    Raises:
        ValueError: it is neither.
    """
    kind, _, number = text.partition(":")
    if text == "uniform":
        return Popularity()
    try:
        exponent = float(number)
    except ValueError:
        exponent = -1.0
    if kind != "zipf" or not 0 <= exponent <= 10:
        raise ValueError(f"popularity {text!r} is not known; use uniform or zipf:1.01 (an exponent from 0 to 10)")
    return zipf(exponent, num_experts)
