"""Process groups: real processes meet through a file and only over loopback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.spawn
@pytest.mark.slow
def test_two_processes_reduce(tmp_path: Path) -> None:
    assert [said.strip() for said in run_rank_processes(CHILD, 2, tmp_path)] == ["3 2", "3 2"]
