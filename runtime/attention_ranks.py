"""How the ranks of an attention replica find each other, where they divide heads: as threads, or as processes.

Not the collectives (attention/tensor_parallel.py) and not the exchange of experts, which all ranks of a group join.
Units: seconds, bytes.
"""

from __future__ import annotations

from pathlib import Path

from ..attention.tensor_parallel import HeadShare, TensorParallelGroup
from ..attention.tensor_parallel_threads import ThreadTensorParallelHub
from ..models.families import load_config
from ..moe.wide_ep.exchanges import GroupShape, ThreadHub
from ..quant import parse_format
from ..telemetry import RankProgress
from ..topologies import Topology, parse_topology
from .process_groups import join_groups
from .processes.launch import WorkerStart, attention_path


class GroupHub(ThreadHub):
    """Where ranks that are threads meet: all of a group for experts, those of an attention replica for heads.

    Args:
        shape, topology: of the group.

    Attributes:
        attention: one an attention replica; none where no heads are divided.
    """

    def __init__(self, shape: GroupShape, topology: Topology) -> None:
        super().__init__(shape.slot_ranges, shape=shape)
        num_replicas = topology.adp if topology.atp > 1 else 0
        self.attention = tuple(ThreadTensorParallelHub(topology.atp) for _ in range(num_replicas))

    def abort(self, reason: str) -> None:
        """Make every rank that waits for others, or comes to wait, raise RuntimeError with `reason`."""
        super().abort(reason)
        for hub in self.attention:
            hub.abort(reason)


def join_attention(
    start: WorkerStart, progress: RankProgress, hub: ThreadHub | None, *, timeout_s: float
) -> TensorParallelGroup | None:
    """Return what joins the ranks of the attention replica; None where each rank has all heads.

    Args:
        start: of this rank.
        progress: of this rank.
        hub: a `GroupHub` where ranks are threads.
        timeout_s: how long to wait for the others, here and in every collective that has a limit.
    """
    atp = parse_topology(start.config.parallel.topology).atp
    if atp == 1:
        return None
    share = HeadShare(start.rank % atp, atp)
    if hub is not None:
        assert isinstance(hub, GroupHub), "ranks that are threads and divide heads, but no place where they meet"
        return hub.attention[start.rank // atp].rank(share.rank)
    from ..attention.tensor_parallel_shm import can_share

    if start.config.parallel.device == "cpu" and can_share():
        return _join_memory(start, share, progress, timeout_s)
    from ..attention.tensor_parallel_distributed import DistributedTensorParallelGroup

    replicas = [tuple(range(first, first + atp)) for first in range(0, start.num_ranks, atp)]
    groups = join_groups(start, replicas, timeout_s)
    return DistributedTensorParallelGroup(groups[replicas[start.rank // atp]], share, progress)


def _join_memory(start: WorkerStart, share: HeadShare, progress: RankProgress, timeout_s: float) -> TensorParallelGroup:
    from ..attention.tensor_parallel_shm import ShmTensorParallelGroup, area_bytes, meet_at

    config = start.config
    model = load_config(Path(config.model.path))
    dtype = parse_format(config.model.dtype_for(model.dtype))
    num_bytes = area_bytes(
        num_rows=config.schedule.max_num_batched_tokens,
        width=model.hidden_size,
        itemsize=dtype.itemsize,
        num_slots=config.schedule.max_num_seqs,
    )
    place = attention_path(Path(start.run_directory), start.rank // share.size)
    return ShmTensorParallelGroup(meet_at(place, share, num_bytes, timeout_s), share, num_bytes, progress)
