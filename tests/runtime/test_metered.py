"""Under which scope the collectives of an attention replica are booked: how far its ranks are from each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moewe.attention.tensor_parallel_threads import ThreadTensorParallelHub
from moewe.runtime.ranks.metered import metered
from moewe.telemetry import SCOPES
from tests.support.setups import Setup


@pytest.mark.parametrize(
    ("topology", "rank", "atp", "scope"),
    [
        ("EP2DP1[atp=2]", 1, 2, "domain"),
        ("EP4DP1[adp=2,atp=2,domains=2+2]", 3, 2, "domain"),
        ("EP4DP1[adp=1,atp=4,domains=2+2]", 1, 4, "between"),
        ("EP4DP1[adp=2,atp=2,domains=1+3]", 0, 2, "between"),
        ("EP4DP1[adp=2,atp=2,domains=1+3]", 2, 2, "domain"),
    ],
)
def test_scope_of_a_replica(topology: str, rank: int, atp: int, scope: str) -> None:
    group = metered(
        ThreadTensorParallelHub(atp).rank(rank % atp), Setup(topology=topology).engine_config(Path("any")), rank
    )
    assert group is not None and group.share.rank == rank % atp
    group._group._count_to_all(torch.zeros(5))
    assert group.take()[0] == [(atp - 1) * 20 * (name == scope) for name in SCOPES]


def test_a_rank_with_all_heads_has_nothing_to_meter() -> None:
    assert metered(None, Setup().engine_config(Path("any")), 0) is None
