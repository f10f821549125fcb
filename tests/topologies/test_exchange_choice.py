"""The choice of an exchange: the same on every rank because it depends on nothing else, and refused in time."""

from __future__ import annotations

import pytest

from moewe.topologies import RankGrid, TopologyError, parse_topology
from moewe.topologies.exchange_choice import (
    EXCHANGES,
    MOST_PADDED_ROWS,
    ExchangeFacts,
    ExchangeRule,
    check_exchange,
    choose_exchange,
    exchanges_to_join,
)


def grid(topology: str, domain_size: int = 64) -> RankGrid:
    return RankGrid(parse_topology(topology), domain_size)


CHOICES = [
    ("EP1DP4", {}, "local"),
    ("EP1DP1", {"asked": "all_to_all", "payload": "fp8"}, "local"),
    ("EP2DP1", {}, "shm"),
    ("EP2DP1", {"as_threads": True}, "threads"),
    ("EP2DP1", {"has_native": False}, "all_to_all"),
    ("EP2DP1", {"device": "cuda"}, "all_to_all"),
    ("EP2DP1", {"device": "cuda", "captures": True}, "padded"),
    ("EP2DP1", {"device": "cuda", "captures": True, "payload": "fp8"}, "padded"),
    ("EP2DP1", {"device": "cuda", "captures": True, "asked": "all_to_all"}, "all_to_all"),
    ("EP4DP1[domains=2+2]", {"device": "cuda", "captures": True}, "hierarchical"),
    ("EP2DP1", {"payload": "fp8"}, "all_to_all"),
    ("EP2DP1", {"asked": "all_to_all"}, "all_to_all"),
    ("EP2DP1", {"asked": "padded"}, "padded"),
    ("EP4DP1[domains=2+2]", {}, "hierarchical"),
    ("EP4DP1[domains=4]", {}, "shm"),
    ("EP4DP1[domains=2+2]", {"as_threads": True, "payload": "fp8"}, "hierarchical"),
    ("EP4DP1[domains=2+2]", {"asked": "all_to_all"}, "all_to_all"),
]


@pytest.mark.parametrize(("topology", "facts", "expected"), CHOICES)
def test_decode_steps_use(topology: str, facts: dict[str, object], expected: str) -> None:
    known = ExchangeFacts(**facts)  # type: ignore[arg-type]
    assert choose_exchange("decode", 4, grid(topology), known) == expected
    assert ExchangeRule(grid=grid(topology), facts=known).name("decode", 4) == expected


def test_a_group_wider_than_a_domain_is_hierarchical() -> None:
    assert choose_exchange("decode", 4, grid("EP64DP1", 8), ExchangeFacts(device="cuda")) == "hierarchical"
    assert choose_exchange("decode", 4, grid("EP64DP1", 72), ExchangeFacts(device="cuda")) == "all_to_all"


@pytest.mark.parametrize(
    ("kind", "bucket", "expected"),
    [
        ("decode", 1, "padded"),
        ("idle", 0, "padded"),
        ("decode", MOST_PADDED_ROWS, "padded"),
        ("decode", MOST_PADDED_ROWS + 1, "all_to_all"),
        ("prefill", 1, "all_to_all"),
        ("mixed", 1, "all_to_all"),
    ],
)
def test_padded_is_for_small_decode_steps(kind: str, bucket: int, expected: str) -> None:
    assert choose_exchange(kind, bucket, grid("EP4DP1"), ExchangeFacts(asked="padded")) == expected


@pytest.mark.parametrize("asked", EXCHANGES)
@pytest.mark.parametrize("topology", ["EP1DP1", "EP4DP1", "EP4DP1[domains=3+1]"])
def test_what_is_chosen_was_joined(asked: str, topology: str) -> None:
    for as_threads in (False, True):
        facts = ExchangeFacts(asked=asked, as_threads=as_threads)
        joined = exchanges_to_join(grid(topology), facts)
        for kind in ("prefill", "decode", "mixed", "idle"):
            for bucket in (0, 1, 64, 65, 4096):
                assert choose_exchange(kind, bucket, grid(topology), facts) in joined


@pytest.mark.parametrize(
    ("topology", "facts", "words"),
    [
        ("EP4DP1", {"asked": "hierarchical"}, ["exchange='hierarchical'", "domains=2+2"]),
        ("EP4DP1", {"asked": "shm", "device": "cuda"}, ["exchange='shm'", "use auto"]),
        ("EP4DP1", {"asked": "shm", "as_threads": True}, ["processes", "use auto"]),
        ("EP4DP1", {"asked": "shm", "has_native": False}, ["native kernels"]),
        ("EP4DP1[domains=2+2]", {"asked": "shm"}, ["one domain", "leave domains out"]),
        ("EP4DP1", {"asked": "shm", "payload": "fp8"}, ["exchange_payload='fp8'", "leave one"]),
    ],
)
def test_what_cannot_work_is_refused(topology: str, facts: dict[str, object], words: list[str]) -> None:
    with pytest.raises(TopologyError) as error:
        check_exchange(grid(topology), ExchangeFacts(**facts))  # type: ignore[arg-type]
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_what_can_work_is_not_refused() -> None:
    for topology, facts, _ in CHOICES:
        check_exchange(grid(topology), ExchangeFacts(**facts))  # type: ignore[arg-type]
