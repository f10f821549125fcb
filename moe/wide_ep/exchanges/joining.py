"""Makes the exchange that a plan names, for one rank, over whatever joins ranks.

Not a process group (topologies/groups.py) and not a choice (topologies/exchange_choice.py). `shm`, `threads` and
`local` need no links and are made by who knows what they need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....telemetry import RankProgress
from .all_to_all import AllToAllExchange
from .contract import Exchange, StagedExchange
from .group_shape import GroupShape
from .hierarchical import HierarchicalExchange
from .links import Link, SlowLink
from .padded import PaddedExchange
from .pairs import PairKernels
from .stepwise import StepwiseExchange
from .wire import make_payload

LinkOf = Callable[[Sequence[int]], Link]


def link_members(name: str, shape: GroupShape) -> tuple[tuple[int, ...], ...]:
    """Return the lists of ranks between which the exchange `name` needs links, in an order that all ranks agree on."""
    if name == "hierarchical":
        return (*shape.rails, *shape.domains)
    return (tuple(range(shape.num_ranks)),)


def join_all_over_links(
    names: Sequence[str],
    shape: GroupShape,
    rank: int,
    link_of: LinkOf,
    *,
    payload: str = "auto",
    progress: RankProgress | None = None,
) -> StagedExchange:
    """Return the exchange that does as each step says where there are several `names`; see `join_over_links`."""
    made = [join_over_links(name, shape, rank, link_of, payload=payload, progress=progress) for name in names]
    return made[0] if len(made) == 1 else StepwiseExchange(made)


def give_kernels(exchange: Exchange, kernels: PairKernels) -> None:
    """Let `exchange` sort and add with `kernels`, where it can, if what it dispatches is read by kernels alone."""
    for each in exchange.each if isinstance(exchange, StepwiseExchange) else (exchange,):
        if isinstance(each, PaddedExchange):
            each.kernels = kernels


def join_over_links(
    name: str,
    shape: GroupShape,
    rank: int,
    link_of: LinkOf,
    *,
    payload: str = "auto",
    progress: RankProgress | None = None,
) -> StagedExchange:
    """Return the exchange `name` of `rank`.

    Args:
        name: one of `topologies.exchange_choice.OVER_LINKS`.
        shape: of the group.
        rank: position in it.
        link_of: the link of a list of ranks, `rank` among them.
        payload: how rows are written, see `make_payload`.
        progress: ticked between collectives.
    """
    written = make_payload(payload)

    def link(ranks: Sequence[int]) -> Link:
        is_far = [shape.domain_of[other] != shape.domain_of[rank] for other in ranks]
        found = link_of(ranks)
        return SlowLink(found, is_far, shape.slow, progress) if shape.slow is not None and any(is_far) else found

    if name == "hierarchical":
        rail, domain = shape.rails[shape.rail_of(rank)], shape.domains[shape.domain_of[rank]]
        return HierarchicalExchange(link(rail), link(domain), shape, rank, payload=written, progress=progress)
    everybody = link(range(shape.num_ranks))
    if name == "padded":
        return PaddedExchange(everybody, shape, payload=written)
    return AllToAllExchange(everybody, shape, payload=written, progress=progress)
