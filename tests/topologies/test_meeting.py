"""Whose fault a broken collective is: of those that went away, not of the rank that noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from moewe.topologies.meeting import Meeting, PeersLostError, blaming_peers
from tests.support.rank_processes import run_rank_processes

CHILD = """
import os, sys
from pathlib import Path
import torch
from moewe.attention.tensor_parallel import HeadShare
from moewe.attention.tensor_parallel_distributed import DistributedTensorParallelGroup
from moewe.moe.wide_ep.exchanges.links import DistributedLink
from moewe.topologies.groups import init_group
from moewe.topologies.meeting import PeersLostError
rank = int(sys.argv[1])
group = init_group(rank=rank, world_size=2, store_path=Path(sys.argv[2]), device="cpu", timeout_s=60)
link, heads = DistributedLink(group), DistributedTensorParallelGroup(group, HeadShare(rank, 2))
rows = torch.zeros(2, 8, dtype=torch.uint8)
assert torch.equal(link.start(rows, [1, 1], [1, 1])(), rows)
if rank == 1:
    os._exit(0)
tries = {
    "swap": lambda: link.start(rows, [1, 1], [1, 1])(),
    "gather": lambda: link.gather(rows)(),
    "reduce": lambda: heads.reduce(torch.zeros(2, 4)),
    "mean": lambda: heads.mean(torch.zeros(2, 4)),
    "first": lambda: heads.first(torch.zeros(1 << 22)),
}
for name, attempt in tries.items():
    try:
        attempt()
        print(name, "nothing")
    except PeersLostError:
        print(name, "peers")
    except Exception as error:
        print(name, repr(error))
sys.stdout.flush()
os._exit(0)
"""


def test_only_what_a_library_raises_about_a_connection_is_blamed_on_others() -> None:
    with pytest.raises(PeersLostError, match="Connection closed by peer"), blaming_peers():
        raise RuntimeError("Connection closed by peer")
    with pytest.raises(ValueError, match="one dimension"), blaming_peers():
        raise ValueError("one dimension is missing")
    meeting = Meeting(2, 0.01, "a game")
    with pytest.raises(PeersLostError, match=r"a game between threads broken: a rank did not come within 0\.01 s"):
        meeting.swap(0, "card")
    meeting.abort("too late to be the reason")
    with pytest.raises(PeersLostError):
        meeting.swap(1, "card")


@pytest.mark.slow
@pytest.mark.spawn
def test_processes_that_lose_one_blame_it(tmp_path: Path) -> None:
    told = run_rank_processes(CHILD, 2, tmp_path)[0].split("\n")[:-1]
    assert told == [f"{name} peers" for name in ("swap", "gather", "reduce", "mean", "first")]
