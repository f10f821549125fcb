"""The only creator of torch.distributed process groups: one for an expert-parallel group, and those of parts of it.

Not an exchange (moe.wide_ep) and not a launcher. Ranks of one host meet through a file, and only the loopback
interface is used. How long collectives wait for other ranks is said when groups are made, and again once all are warm.
Units: seconds. torch is imported when a group is made, not before.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from .meeting import blaming_peers
from .spec import TopologyError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Groups: TypeAlias = "dict[tuple[int, ...], ProcessGroup]"  # by their ranks, ascending

log = logging.getLogger(__name__)
_joined: list[ProcessGroup] = []  # by this process, as torch has one default group a process


def loopback_interface() -> str:
    """Return the name of the interface that leads back to this host (`lo`, `lo0`)."""
    for _, name in socket.if_nameindex():
        if name == "lo" or (name.startswith("lo") and name[2:].isdigit()):
            return name
    raise TopologyError("this host has no loopback network interface, by which its ranks would meet; bring `lo` up")


def init_group(*, rank: int, world_size: int, store_path: Path, device: str, timeout_s: float) -> ProcessGroup:
    """Join the group of `world_size` ranks on this host and return it; blocks until all are there.

    A process joins once; asked again it gets the same group.

    Args:
        rank: position in the group, 0..world_size-1.
        world_size: x, ranks of the group.
        store_path: a file that does not exist yet in a folder private to this launch; the same for all ranks.
        device: `cpu` (gloo) or `cuda` (NCCL).
        timeout_s: how long to wait for the others, here and in every collective.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        joined = dist.group.WORLD
        assert joined is not None and joined.size() == world_size, world_size
        return joined
    # Without these the libraries pick the address of the host name, which may be unreachable or public.
    interface = loopback_interface()
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    if device.startswith("cuda"):
        os.environ["NCCL_SOCKET_IFNAME"] = interface
    with blaming_peers():
        dist.init_process_group(
            backend="nccl" if device.startswith("cuda") else "gloo",
            store=dist.FileStore(str(store_path), world_size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    group = dist.group.WORLD
    assert group is not None
    _joined.append(group)
    return group


def make_subgroups(
    members: Sequence[Sequence[int]], *, rank: int, timeout_s: float
) -> dict[tuple[int, ...], ProcessGroup]:
    """Make a group of each list of ranks, within the group that was joined; return those that `rank` is in, by list.

    A collective over all ranks: every one calls it with the same lists in the same order. A list of one rank gets none,
    the list of all ranks is the group itself.

    Args:
        members: lists of ranks, ascending.
        rank: of this process.
        timeout_s: how long to wait for the others, here and in every collective.
    """
    import torch.distributed as dist

    everybody = tuple(range(dist.get_world_size()))
    groups: Groups = {}
    for ranks in dict.fromkeys(map(tuple, members)):
        if len(ranks) == 1:
            continue
        # Others' groups have to be made here, too: torch.distributed counts them to tell them apart.
        with blaming_peers():
            made = dist.group.WORLD if ranks == everybody else dist.new_group(list(ranks), timedelta(seconds=timeout_s))
        if rank in ranks:
            assert made is not None
            groups[ranks] = made
            _joined.append(made)
    return groups


def limit_waits(timeout_s: float) -> None:
    """Give collectives of all groups of this process so long, from the next one on; nothing without a group.

    Those that a CUDA graph holds have no timer in torch, when they are captured as when they are replayed.

    Args:
        timeout_s: how long to wait for the others, as `init_group` takes it.
    """
    if not _joined:
        return
    from torch.distributed import distributed_c10d

    set_timeout = getattr(distributed_c10d, "_set_pg_timeout", None)  # of torch, for NCCL and gloo; not documented
    if set_timeout is None:
        log.info("collectives keep the patience that they had at start: this version of torch cannot change it")
        return
    for group in dict.fromkeys(_joined):
        set_timeout(timedelta(seconds=timeout_s), group)


def destroy_group() -> None:
    """Leave the group, if one was joined."""
    import torch.distributed as dist

    _joined.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
