"""In which turns replicas of one layout take the places of those of another, so that others serve meanwhile.

Not the change itself (server/http/layout_change.py). Pure. Units: ranks, numbers of replicas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..spec import Topology, TopologyError

BESIDE, IN_TURNS = "beside", "in turns"


@dataclass(frozen=True)
class Turn:
    """These old replicas end and these new ones begin, on the same places."""

    old: tuple[int, ...]
    new: tuple[int, ...]


def beside(before: Topology, after: Topology) -> tuple[Turn, ...]:
    """Return the one turn in which all new replicas begin before any old one ends: there is room for both."""
    return (Turn(tuple(range(before.dp)), tuple(range(after.dp))),)


def in_turns(before: Topology, after: Topology) -> tuple[Turn, ...]:
    """Return turns each of which frees the places of as few groups as new ones fit exactly.

    Raises:
        TopologyError: a turn would take all replicas, or places would be left over; one line with the fix.

    Example:
        >>> from moewe.topologies import parse_topology
        >>> in_turns(parse_topology("EP1DP4"), parse_topology("EP2DP2"))
        (Turn(old=(0, 1), new=(0,)), Turn(old=(2, 3), new=(1,)))
    """
    change = f"{before.short()} to {after.short()}"
    if before.num_ranks != after.num_ranks:
        raise TopologyError(
            f"{change} changes the number of ranks from {before.num_ranks} to {after.num_ranks}, and there is no room "
            f"to start it beside; restart the server with --topology {after.short()}"
        )
    places = math.lcm(before.ep, after.ep)
    if places >= before.num_ranks:
        raise TopologyError(
            f"{change} takes the places of all replicas at once, and there is no room to start it beside, so nobody "
            f"would serve; restart the server with --topology {after.short()}"
        )
    return tuple(
        Turn(
            tuple(range(first // before.ep, (first + places) // before.ep)),
            tuple(range(first // after.ep, (first + places) // after.ep)),
        )
        for first in range(0, before.num_ranks, places)
    )
