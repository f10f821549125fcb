"""What was measured of links is kept for the next start, and nothing odd in that file does harm."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moewe.runtime import known_links
from moewe.runtime.known_links import recall, remember
from moewe.topologies import parse_topology
from moewe.topologies.exchange_cost import ExchangeCost, LayoutLink

COST = ExchangeCost(name="shm", fixed_s=2e-4, within_s=1e-9, between_s=0.0)
EP2 = parse_topology("EP2DP1")
KEPT = LayoutLink(topology=EP2.long(), cost=COST)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOEWE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_was_measured_is_known_by_device_until_it_is_measured_again(folder: Path) -> None:
    assert recall("cpu") == ()
    remember("cpu", EP2, COST)
    newer = ExchangeCost(name="all_to_all", fixed_s=3e-3, within_s=2e-9, between_s=0.0, hidden=0.5)
    remember("cuda", EP2, newer)
    assert (recall("cpu"), recall("cuda")) == ((KEPT,), (replace(KEPT, cost=newer),))
    slowed = parse_topology("EP4DP1[domains=2+2,rate=100,delay=20]")
    remember("cpu", slowed, newer)
    again = replace(COST, fixed_s=1.0)
    remember("cpu", parse_topology("EP2DP3[red=2]"), again)
    assert recall("cpu") == (LayoutLink(topology=slowed.long(), cost=newer), replace(KEPT, cost=again))
    assert [path.name for path in folder.iterdir()] == ["links.json"]


def test_another_machine_knows_nothing_of_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(300):
        monkeypatch.setattr(known_links.platform, "node", lambda number=number: f"host-{number}")
        assert recall("cpu") == ()
        remember("cpu", EP2, COST)
    assert len(json.loads((folder / "links.json").read_bytes())) == 256


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b'{"x": 1}', b"\xff" * 9, b" " * (1 << 18),
        b'{"KEY": {"name": "shm", "fixed_s": -1, "within_s": 0, "between_s": 0}}',
        b'{"KEY": {"name": "shm", "fixed_s": 1e999, "within_s": 0, "between_s": 0}}',
        b'{"KEY": {"name": "shm", "fixed_s": "1", "within_s": 0, "between_s": 0}}',
    ],
)  # fmt: skip
def test_a_file_that_is_not_ours_counts_as_none_and_is_written_anew(folder: Path, content: bytes) -> None:
    folder.mkdir()
    (folder / "links.json").write_bytes(content.replace(b"KEY", known_links._key("cpu", "EP2DP1 shm").encode()))
    assert recall("cpu") == ()
    remember("cpu", EP2, COST)
    assert recall("cpu") == (KEPT,)


def test_without_a_place_to_keep_it_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MOEWE_CACHE_DIR", str(tmp_path / "file" / "below"))
    remember("cpu", EP2, COST)
    assert recall("cpu") == ()
