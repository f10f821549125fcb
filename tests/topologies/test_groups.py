"""Process groups: real processes meet through a file and only over loopback."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import distributed_c10d

from moewe.topologies import groups
from moewe.topologies.groups import loopback_interface
from tests.support.rank_processes import run_rank_processes

CHILD = """
import sys
from pathlib import Path
import torch, torch.distributed as dist
from moewe.topologies.groups import destroy_group, init_group
rank = int(sys.argv[1])
group = init_group(rank=rank, world_size=2, store_path=Path(sys.argv[2]), device="cpu", timeout_s=60)
value = torch.tensor([rank + 1])
dist.all_reduce(value, group=group)
destroy_group()
destroy_group()
print(int(value), group.size())
"""


def test_loopback_has_a_name() -> None:
    assert loopback_interface().startswith("lo")


def test_importing_groups_does_not_import_torch() -> None:
    code = "import moewe.topologies, moewe.topologies.groups, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


PATIENCE = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
from moewe.topologies.groups import init_group, limit_waits
rank, store = int(sys.argv[1]), Path(sys.argv[2])
group = init_group(rank=rank, world_size=2, store_path=store, device="cpu", timeout_s=60)
value = torch.ones(1)
if rank == 1:
    time.sleep(1.0)
dist.all_reduce(value, group=group)  # at start a slow rank is waited for
limit_waits(0.5)
gave_up = store.with_name("gave_up")
if rank == 1:
    while not gave_up.exists():
        time.sleep(0.01)
    print("never came")
else:
    began = time.monotonic()
    try:
        dist.all_reduce(value, group=group)
    except RuntimeError as error:
        print("gave up" if 0.4 < time.monotonic() - began < 50 else error)
    finally:
        gave_up.touch()
"""


@pytest.mark.spawn
@pytest.mark.slow
def test_ranks_that_are_warm_wait_for_others_only_as_long_as_they_are_told(tmp_path: Path) -> None:
    assert [said.strip() for said in run_rank_processes(PATIENCE, 2, tmp_path)] == ["gave up", "never came"]


def test_a_process_without_groups_has_nothing_to_limit() -> None:
    code = "import sys; from moewe.topologies.groups import limit_waits as f; f(1.0); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_group_is_limited_once_and_an_older_torch_says_that_it_cannot(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    whole, part, told = object(), object(), []
    monkeypatch.setattr(groups, "_joined", [whole, part, whole])
    monkeypatch.setattr(distributed_c10d, "_set_pg_timeout", lambda *asked: told.append(asked))
    groups.limit_waits(90.0)
    assert told == [(timedelta(seconds=90), whole), (timedelta(seconds=90), part)] and not caplog.text
    monkeypatch.delattr(distributed_c10d, "_set_pg_timeout")
    groups.limit_waits(90.0)
    assert "this version of torch cannot change it" in caplog.text


@pytest.mark.spawn
@pytest.mark.slow
def test_two_processes_reduce(tmp_path: Path) -> None:
    assert [said.strip() for said in run_rank_processes(CHILD, 2, tmp_path)] == ["3 2", "3 2"]
