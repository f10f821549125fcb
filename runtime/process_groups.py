"""How ranks that are processes join torch's groups: that of all ranks, and those of parts of it.

Not what makes a group (topologies/groups.py) and not what joins ranks that are threads or share memory.
Units: seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..topologies.groups import Groups, init_group, make_subgroups
from .processes.launch import WorkerStart, store_path


def join_groups(start: WorkerStart, members: Sequence[tuple[int, ...]], timeout_s: float) -> Groups:
    """Join the group of all ranks, and return a group for each of `members`, see `make_subgroups`.

    Args:
        start: of this rank.
        members: ranks of each part; the same on all ranks.
        timeout_s: how long to wait for the others, here and in every collective.
    """
    init_group(
        rank=start.rank,
        world_size=start.num_ranks,
        store_path=store_path(Path(start.run_directory)),
        device=start.config.parallel.device,
        timeout_s=timeout_s,
    )
    return make_subgroups(members, rank=start.rank, timeout_s=timeout_s)
