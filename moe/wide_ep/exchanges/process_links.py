"""The links between ranks that are processes, over the groups that they have joined.

Not the groups (topologies/groups.py makes them) and not the link itself (links.py). On a GPU links can rehearse, and
the exchange of fixed shapes gets registered memory where the back end has any.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist

from ....topologies.meeting import blaming_peers
from .joining import LinkOf
from .links import DistributedLink, Link, LoneLink
from .registered_room import RegisteringBackend, open_room
from .rehearsed_link import RehearsedLink

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# NCCL would register buffers of captured collectives by itself, but those of a rank that runs the same step without a
# graph it would not, and its collectives must not mix the two. What is registered here is so for both.
_GRAPH_REGISTER = "NCCL_GRAPH_REGISTER"


def process_links(groups: Mapping[tuple[int, ...], ProcessGroup], names: Sequence[str], device: str) -> LinkOf:
    """Return what gives the link of a list of ranks. On a GPU with `padded` among `names` a collective of all ranks.

    Args:
        groups: of each list of two ranks and more that a link is asked for.
        names: of the exchanges to join.
        device: `cpu` or `cuda`; of a GPU the current one is meant.
    """
    if not device.startswith("cuda"):
        return lambda ranks: DistributedLink(groups[tuple(ranks)]) if len(ranks) > 1 else LoneLink()
    os.environ.setdefault(_GRAPH_REGISTER, "0")
    widest = max(groups.values(), key=lambda group: group.size(), default=None)
    room, here = None, torch.device("cuda", torch.cuda.current_device())
    if widest is not None and "padded" in names:
        backend = cast(RegisteringBackend, widest._get_backend(here))  # torch's stubs know that of no back end
        room = open_room(backend, here, _agreement(widest, here))

    def link_of(ranks: Sequence[int]) -> Link:
        if len(ranks) == 1:
            return LoneLink()
        group = groups[tuple(ranks)]
        return RehearsedLink(DistributedLink(group, room if group is widest else None))

    return link_of


def _agreement(group: ProcessGroup, device: torch.device) -> Callable[[bool], bool]:
    def agree(could: bool) -> bool:
        all_could = torch.tensor([could], dtype=torch.int32, device=device)
        with blaming_peers():
            dist.all_reduce(all_could, op=dist.ReduceOp.MIN, group=group)
        return bool(all_could.item())

    return agree
