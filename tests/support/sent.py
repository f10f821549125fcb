"""What a MoE layer puts on links, worked out the long way: one row at a time, from the ranks that its choices lead to.

Not the meters of exchanges and nothing of their arithmetic: the ways are those that the pages of the exchanges tell.
Units: bytes that a rank sends, by scope; what stays on a rank is of the first scope.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moewe.telemetry import SCOPES

Send = Callable[[int, int, int], None]  # from, to, bytes
_COUNT, _NUMBER = 8, 4  # bytes of a count of rows, and of a slot's number, a rank's or a weight in front of a row


@dataclass(frozen=True, kw_only=True)
class Wire:
    """How rows look and where ranks sit.

    Attributes:
        exchange: its name.
        row_bytes: of an output, as it comes back.
        written_bytes: of a row on its way out: as it is, or in fp8 with its scales.
        top_k: choices of a token.
        domains: the ranks of each.
    """

    exchange: str
    row_bytes: int
    written_bytes: int
    top_k: int
    domains: tuple[tuple[int, ...], ...]

    def scope(self, one: int, other: int) -> int:
        """Return how far one rank is from another."""
        return 0 if one == other else 1 if any({one, other} <= set(ranks) for ranks in self.domains) else 2


def sent_in_layer(wire: Wire, owners: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    """Return what each rank sends, [W][scope].

    Args:
        wire: see there.
        owners: of each rank's tokens the ranks of their choices, in the order of k, one as often as it is chosen.
    """
    sent = [[0] * len(SCOPES) for _ in owners]

    def send(one: int, other: int, num_bytes: int) -> None:
        sent[one][wire.scope(one, other)] += num_bytes

    if wire.exchange == "local":
        return sent
    if wire.exchange == "padded":
        _room_for_all(wire, max(map(len, owners)), len(owners), send)
        return sent
    is_hierarchical = wire.exchange == "hierarchical"
    way = _across_domains if is_hierarchical else _at_once
    for source, tokens in enumerate(owners):
        for choices in tokens:
            way(wire, source, choices, send)
        if wire.exchange != "threads":
            for other in _rail_and_domain(wire, source) if is_hierarchical else _others(wire, source):
                send(source, other, _COUNT)
    return sent


def _at_once(wire: Wire, source: int, choices: Sequence[int], send: Send) -> None:
    """A row goes once to a rank; an answer comes back for every choice. Over links the choices stand in front."""
    header = 0 if wire.exchange == "threads" else _NUMBER * wire.top_k
    for owner in set(choices):
        send(source, owner, header + wire.written_bytes)
    for owner in choices:
        send(owner, source, wire.row_bytes)


def _room_for_all(wire: Wire, rows: int, num_ranks: int, send: Send) -> None:
    """Room for the rows of the fullest rank, up to a power of two, goes to all, and for each of their choices back."""
    room = next(1 << power for power in range(32) if 1 << power >= rows)
    for one in range(num_ranks):
        for other in range(num_ranks):
            send(one, other, room * (_NUMBER * wire.top_k + wire.written_bytes))
            send(other, one, room * wire.top_k * wire.row_bytes)


def _across_domains(wire: Wire, source: int, choices: Sequence[int], send: Send) -> None:
    """A row goes once to a domain, with its weights, and from there to ranks; one sum comes back from a domain."""
    row = _NUMBER * wire.top_k + wire.written_bytes
    for ranks in wire.domains:
        here = [owner for owner in choices if owner in ranks]
        if not here:
            continue
        entry = source if source in ranks else ranks[_rail(wire, source)]
        send(source, entry, row + _NUMBER * wire.top_k)
        for owner in set(here):
            send(entry, owner, _NUMBER + row)
        for owner in here:
            send(owner, entry, wire.row_bytes)
        send(entry, source, wire.row_bytes)


def _rail(wire: Wire, rank: int) -> int:
    """The place of a rank in its domain, counted round by the smallest domain."""
    (own,) = (ranks for ranks in wire.domains if rank in ranks)
    return own.index(rank) % min(map(len, wire.domains))


def _others(wire: Wire, rank: int) -> list[int]:
    return [other for ranks in wire.domains for other in ranks if other != rank]


def _rail_and_domain(wire: Wire, rank: int) -> list[int]:
    """Whom a rank tells how many rows come: all of its rail, then all of its domain; one of both is told twice."""
    others = _others(wire, rank)
    on_rail = [other for other in others if _rail(wire, other) == _rail(wire, rank)]
    return on_rail + [other for other in others if wire.scope(rank, other) == 1]
