"""In which turns replicas of one layout take the places of those of another, so that others serve meanwhile.

Not the change itself (server/http/layout_change.py). Pure. Ways: BESIDE what runs, IN_TURNS in its places, or only by a
RESTART of the server. Units: ranks, numbers of replicas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..spec import Topology, TopologyError

BESIDE, IN_TURNS, RESTART = WAYS = ("beside", "in turns", "restart")


@dataclass(frozen=True)
class Turn:
    """These old replicas end and then these new ones begin, where all old ones that stood in their way have ended."""

    old: tuple[int, ...]
    new: tuple[int, ...]


def beside(before: Topology, after: Topology) -> tuple[Turn, ...]:
    """Return the one turn in which all new replicas begin before any old one ends: there is room for both."""
    return (Turn(tuple(range(before.dp)), tuple(range(after.dp))),)


def in_turns(before: Topology, after: Topology, *, is_shared: bool) -> tuple[Turn, ...]:
    """Return turns in which new replicas take the places of old ones, each as soon as its own are free.

    Args:
        before, after: the layouts.
        is_shared: ranks divide one host, so a replica's place is its part of it, however many ranks there are; else a
            rank's place is a device, in order.

    Raises:
        TopologyError: the first turn would take all replicas; one line with the fix.

    Example:
        >>> from moewe.topologies import parse_topology
        >>> in_turns(parse_topology("EP1DP4"), parse_topology("EP2DP2"), is_shared=True)
        (Turn(old=(0, 1), new=(0,)), Turn(old=(2, 3), new=(1,)))
    """
    whole = math.lcm(before.dp, after.dp)
    old_width = whole // before.dp if is_shared else before.ep
    new_width = whole // after.dp if is_shared else after.ep
    turns: list[Turn] = []
    num_ended = 0
    for index in range(after.dp):
        # Old replicas that reach into its place; places go in order, so they are the next ones.
        needed = min(before.dp, -(-(index + 1) * new_width // old_width))
        if needed > num_ended:
            turns.append(Turn(tuple(range(num_ended, needed)), (index,)))
            num_ended = needed
        else:
            turns[-1] = Turn(turns[-1].old, (*turns[-1].new, index))
    if len(turns[0].old) == before.dp:
        raise TopologyError(
            f"{before.short()} to {after.short()} would end all replicas before a new one has room to begin, so nobody "
            f"would serve; restart the server with --topology {after.short()}"
        )
    if num_ended < before.dp:
        turns.append(Turn(tuple(range(num_ended, before.dp)), ()))  # places that the new layout leaves empty
    return tuple(turns)


def work_lost(turns: Sequence[Turn], before: Topology, after: Topology) -> float:
    """Return the part of all replicas that does not serve, added up over turns that each wait for a start.

    Example:
        >>> from moewe.topologies import parse_topology
        >>> old, new = parse_topology("EP1DP4"), parse_topology("EP2DP2")
        >>> work_lost(in_turns(old, new, is_shared=True), old, new)
        1.0
    """
    lost, ended, begun = 0.0, 0, 0
    for turn in turns:
        ended += len(turn.old)
        if turn.new:
            lost += max(0.0, ended / before.dp - begun / after.dp)
        begun += len(turn.new)
    return lost
