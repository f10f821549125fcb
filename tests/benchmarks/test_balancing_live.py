"""benchmarks/balancing_live.py draws the traffic that it names. Nothing is served and nothing timed."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest


def test_traffic_is_hot_shifts_or_is_even(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import balancing_live

    def tokens(traffic: str, seed: int) -> set[int]:
        args = Namespace(traffic=traffic, requests=8, prompt_tokens=64, vocabulary=4, shift=5)
        made = balancing_live.drawn(1000, args, seed)
        assert np.shape(made) == (8, 64) and made == balancing_live.drawn(1000, args, seed)
        return {token for prompt in made for token in prompt}

    hot, shifting = [tokens("hot", seed) for seed in range(10)], [tokens("shifting", seed) for seed in range(10)]
    assert all(each == hot[0] for each in hot) and len(hot[0]) <= 4
    assert shifting[0] == shifting[4] != shifting[5] == shifting[9]
    assert len(tokens("uniform", 3)) > 300 and min(tokens("uniform", 3)) >= 1
