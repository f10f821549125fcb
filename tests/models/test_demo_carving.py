"""Tests of the carving's parts on small random layers.

Not its quality, which benchmarks/demo_quality.py measures.
T tokens, F 1,536 neurons, D 24, E 16 experts.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moewe.models.demo.carve import balanced_kmeans, carve_layer, fit_router

pytest.importorskip("scipy", reason="carving needs the dev extra")


def test_kmeans_finds_planted_groups_of_equal_size() -> None:
    generator = torch.Generator().manual_seed(0)
    planted = torch.arange(4).repeat_interleave(8)[torch.randperm(32, generator=generator)]
    points = torch.nn.functional.one_hot(planted).float() + 0.05 * torch.randn(32, 4, generator=generator)
    best = min(
        (balanced_kmeans(points @ points.T, 4, np.random.default_rng(seed)) for seed in range(8)),
        key=lambda groups: sum(
            ((points[groups == g] - points[groups == g].mean(0)) ** 2).sum().item() for g in range(4)
        ),
    )
    assert np.bincount(best).tolist() == [8, 8, 8, 8]
    assert all(len(set(planted[best == g].tolist())) == 1 for g in range(4))


def test_layer_order_puts_heavy_neurons_first_and_holds_each_once() -> None:
    generator = torch.Generator().manual_seed(1)
    x, h = torch.randn(300, 24, generator=generator), torch.randn(300, 1536, generator=generator)
    down = torch.randn(24, 1536, generator=generator)
    heavy = torch.randperm(1536, generator=generator)[:512]
    h[:, heavy] *= 10
    order, router = carve_layer(x, h, down, np.random.default_rng(0))
    assert sorted(order.tolist()) == list(range(1536))
    assert set(order[:512].tolist()) == set(heavy.tolist())
    assert router.shape == (16, 24)


def test_router_prefers_the_expert_with_the_larger_output() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2000, 24, generator=generator)
    norms = 5 + x[:, :16]
    logits = x @ fit_router(x, norms).T
    assert abs(logits.std().item() - 0.1) < 1e-3
    assert (logits.argmax(1) == norms.argmax(1)).float().mean() > 0.95
