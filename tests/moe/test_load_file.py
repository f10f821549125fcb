"""Load files: what was written comes back, and files that lie, of other models or from strangers are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moewe.moe.wide_ep.balancing import ExpertLoad, expected_imbalance, expected_rows, read_load, write_load
from moewe.moe.wide_ep.balancing.load_file import PAIRS_PER_EXPERT
from moewe.moe.wide_ep.balancing.replay import load_of
from moewe.moe.wide_ep.placement import (
    affinity_of,
    balanced_placement,
    expert_load,
    first_placement,
    linear_placement,
    traffic,
)
from moewe.moe.wide_ep.synthetic import correlated, zipf
from moewe.moe.wide_ep.traces import RoutingTrace

PREFILL = np.array([[5, 0, 2], [1, 2**53, 0]])


def read(path: Path) -> ExpertLoad:
    return read_load(path, num_layers=2, num_experts=3)


@pytest.mark.parametrize("phases", [{"prefill": PREFILL}, {"decode": PREFILL, "prefill": PREFILL // 2}])
def test_loads_come_back(tmp_path: Path, phases: dict[str, np.ndarray]) -> None:
    write_load(ExpertLoad(phases=phases), tmp_path / "load.json")
    found = read(tmp_path / "load.json")
    assert set(found.phases) == set(phases)
    for phase, load in phases.items():
        np.testing.assert_array_equal(found.phases[phase], load)
    np.testing.assert_array_equal(found.total, sum(phases.values()))


def test_pairs_come_back_and_place_experts_of_a_team_in_one_domain(tmp_path: Path) -> None:
    """Teams of eight experts fire together; loads alone scatter them over two domains, the pairs of a file do not."""
    ids = np.stack([correlated(6000, 32, 4, seed=seed) for seed in range(2)])
    domains, source = (0, 0, 1, 1), np.arange(2000) % 4
    recorded = load_of(RoutingTrace(num_experts=32, ids={"prefill": ids[:, :2000], "decode": ids[:, 2000:4000]}))
    write_load(recorded, tmp_path / "load.json")
    found = read_load(tmp_path / "load.json", num_layers=2, num_experts=32)
    for layer, pairs in enumerate(found.together):
        np.testing.assert_array_equal(pairs, recorded.together[layer])
        assert len(pairs) <= PAIRS_PER_EXPERT * 32 and (pairs[:, 0] < pairs[:, 1]).all() and (pairs[:, 2] > 0).all()
    affinity = [affinity_of(pairs, 32) for pairs in found.together]
    crossing = {}
    for name, known in (("loads", None), ("pairs", affinity)):
        placement = balanced_placement(found.total, num_redundant=0, domains=domains, affinity=known)
        layers = [traffic(ids[layer, 4000:], placement, layer, source) for layer in range(2)]
        crossing[name] = sum(each.bytes_between(100, hierarchical=True) for each in layers)
        assert all(each.imbalance < 1.15 for each in layers)
    assert crossing["pairs"] < 0.8 * crossing["loads"], crossing


def sound() -> dict[str, Any]:
    return {"moewe_load": 1, "num_layers": 2, "num_experts": 3, "decode": [[1, 2, 3], [4, 5, 6]]}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"moewe_load": 2}, "moewe_load=2"),
        ({"num_layers": 4}, "num_layers=4, but the model has 2"),
        ({"num_experts": 8}, "num_experts=8, but the model has 3"),
        ({"decode": [[1, 2, 3]]}, "decode must hold 2 rows of 3"),
        ({"decode": [[1, 2, 3], [4, 5]]}, "decode must hold 2 rows of 3"),
        ({"decode": [[1, 2, 3], [4, 5, -1]]}, "decode"),
        ({"decode": [[1, 2, 3], [4, 5, 0.5]]}, "decode"),
        ({"decode": [[1, 2, 3], [4, 5, 2**60]]}, "decode"),
        ({"decode": [[1, 2, 3], [4, 5, "6"]]}, "decode"),
        ({"decode": None}, "neither prefill nor decode"),
        ({"other": 1}, "other"),
        ({"together": [[]]}, "together must hold 2 lists"),
        ({"together": [[[0, 1, 5]] * 25, []]}, "at most 24 pairs"),
        ({"together": [[[1, 1, 5]], []]}, "together has the pair 1, 1"),
        ({"together": [[[1, 3, 5]], []]}, "together has the pair 1, 3"),
        ({"together": [[[0, 1, -5]], []]}, "together"),
        ({"together": [[[0, 1]], []]}, "together"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_field(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    path = tmp_path / "load.json"
    path.write_text(json.dumps({**sound(), **change}))
    with pytest.raises(ValueError, match="load file") as told:
        read(path)
    assert complaint in str(told.value) and "\n" not in str(told.value)


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"\xff\xfe", b"PK\x03\x04", DEEP, b'{"decode": ' + DEEP],
    ids=["empty", "open", "list", "latin", "zip", "deep", "deep inside"],
)
def test_files_that_are_none_are_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "load.json"
    path.write_bytes(text)
    with pytest.raises(ValueError, match="is no load file"):
        read(path)


def test_missing_and_huge_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read(tmp_path / "none")
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        read(tmp_path)
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(ValueError, match="is larger than"):
        read(tmp_path / "huge")


def test_loads_of_another_form_are_refused() -> None:
    for phases in ({}, {"mixed": PREFILL}, {"decode": PREFILL[0]}, {"decode": PREFILL, "prefill": PREFILL[:1]}):
        with pytest.raises(ValueError, match="a load is"):
            ExpertLoad(phases=phases)


def test_expected_rows_are_those_of_the_traffic() -> None:
    ids = np.stack([zipf(4096, 32, 4, seed=seed) for seed in range(2)])
    load = expert_load(ids, 32)
    domains = (0, 0, 1, 1)
    source = np.arange(4096) % 4
    for placement in (
        linear_placement(2, 32, domains=domains),
        first_placement(2, 32, num_redundant=4, domains=domains),
        balanced_placement(load, num_redundant=8, domains=domains),
    ):
        for layer in range(2):
            real = traffic(ids[layer], placement, layer, source)
            assert expected_rows(placement, load)[layer] == pytest.approx(real.rows, rel=0.05)
            assert expected_imbalance(placement, load)[layer] == pytest.approx(real.imbalance, rel=0.05)
    assert (expected_imbalance(placement, load) < 1.1).all()
