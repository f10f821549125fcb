"""Expectations over random routing, against figures that others publish and against drawing it."""

from __future__ import annotations

import numpy as np
import pytest

from moewe.topologies.planner.routing import (
    Popularity,
    distinct_share,
    measured,
    parse_popularity,
    placed_imbalance,
    places_hit,
    random_imbalance,
    zipf,
)


def drawn(chances: int, rows: int, top_k: int, generator: np.random.Generator) -> np.ndarray:
    """Choices of `rows` rows without popularity [rows, K]."""
    return generator.random((rows, chances)).argpartition(top_k, axis=1)[:, :top_k]


@pytest.mark.parametrize(
    ("num_experts", "top_k", "rows", "share"),
    [(256, 8, 1, 0.031), (256, 8, 16, 0.398), (256, 8, 128, 0.983), (128, 8, 32, 0.873), (8, 2, 4, 0.684)],
)
def test_distinct_experts_of_even_routing(num_experts: int, top_k: int, rows: int, share: float) -> None:
    chances = Popularity().inclusion(num_experts, top_k)
    assert distinct_share(chances, rows) == pytest.approx(share, abs=6e-4)


def test_popular_experts_make_fewer_distinct_ones() -> None:
    even = distinct_share(Popularity().inclusion(256, 8), 32)
    shares = [distinct_share(zipf(exponent, 256).inclusion(256, 8), 32) for exponent in (0, 0.5, 1.0)]
    assert shares[0] == pytest.approx(even) and shares[0] > shares[1] > shares[2]
    assert distinct_share(np.array([1.0, 0.0]), 5) == 0.5 and distinct_share(np.array([1.0]), 0) == 0


def test_nobody_is_chosen_more_than_once_by_a_row() -> None:
    chance = Popularity(((0.97, 0.01, 0.01, 0.01),)).inclusion(4, 2)[0]
    assert chance.sum() == pytest.approx(2) and chance.max() == 1 and chance[1] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("num_experts", "top_k", "places", "hit"),
    [(256, 8, 8, 5.29), (256, 8, 64, 7.68), (384, 6, 16, 5.17), (128, 4, 32, 3.86), (8, 2, 1, 1.0)],
)
def test_destinations_of_a_row(num_experts: int, top_k: int, places: int, hit: float) -> None:
    assert places_hit(num_experts, top_k, places) == pytest.approx(hit, abs=6e-3)


@pytest.mark.parametrize("places", [2, 4, 8, 32])
def test_destinations_with_groups_of_experts(places: int) -> None:
    generator = np.random.default_rng(1)
    hit = []
    for _ in range(2000):
        groups = generator.permutation(8)[:4]
        experts = (groups[:, None] * 32 + np.arange(32)).ravel()
        chosen = generator.choice(experts, 8, replace=False)
        hit.append(len(np.unique(chosen // (256 // places))))
    assert places_hit(256, 8, places, groups=8, top_groups=4) == pytest.approx(np.mean(hit), rel=0.015)
    assert places_hit(256, 8, places, groups=8, top_groups=4) < places_hit(256, 8, places)


@pytest.mark.parametrize(("ranks", "batch"), [(32, 1), (32, 16), (64, 8), (8, 4)])
def test_imbalance_by_chance(ranks: int, batch: int) -> None:
    generator, most = np.random.default_rng(0), []
    for _ in range(60):
        experts = drawn(256, ranks * batch, 8, generator)
        most.append(np.bincount(experts.ravel() // (256 // ranks), minlength=ranks).max() / (batch * 8))
    assert random_imbalance(ranks * batch * 8, ranks) == pytest.approx(np.mean(most), rel=0.04)
    assert random_imbalance(100, 1) == 1


def test_imbalance_of_placements() -> None:
    assert placed_imbalance(np.full((1, 256), 1 / 32), 32) == pytest.approx(1)
    assert placed_imbalance(np.array([[3.0, 1, 1, 1]]), 2) == pytest.approx(4 / 3)
    assert placed_imbalance(np.array([[3.0, 1, 1, 1]]), 1) == 1
    assert placed_imbalance(np.array([[3.0, 1, 1, 1], [1, 1, 1, 1]]), 2) == pytest.approx((4 / 3 + 1) / 2)


def test_measured_loads_are_taken_layer_by_layer() -> None:
    # Another expert is hot in each layer: all together they would look even.
    loads = np.array([[90, 5, 5], [5, 90, 5], [5, 5, 90], [0, 0, 0]])
    made = measured(loads)
    chances = made.inclusion(3, 1)
    assert chances.shape == (4, 3) and chances[1].tolist() == pytest.approx([0.05, 0.9, 0.05])
    assert chances[3].tolist() == pytest.approx([1 / 3] * 3)
    assert placed_imbalance(chances, 3) == pytest.approx((2.7 * 3 + 1) / 4)
    assert distinct_share(chances[:3], 2) < distinct_share(Popularity().inclusion(3, 1), 2)


@pytest.mark.parametrize("text", ["", "zipf", "zipf:", "zipf:-1", "zipf:x", "flat", "zipf:1:2"])
def test_unknown_popularity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"use uniform or zipf:1\.01"):
        parse_popularity(text, 8)
    assert parse_popularity("uniform", 8) == Popularity() and len(parse_popularity("zipf:1.01", 8).shares[0]) == 8
