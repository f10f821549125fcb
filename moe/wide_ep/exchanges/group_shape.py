"""Who is in an expert-parallel group: which slots each rank owns, which domain it sits in, how far one is from another.

Not a process group (topologies/groups.py) and not a placement of experts (placement.py): numbers of ranks only.
Letters: W ranks, P slots of the group. Units: ranks count from 0 within the group; MB/s (10^6 bytes), microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .traffic import BETWEEN_DOMAINS, IN_DOMAIN, SAME_RANK


@dataclass(frozen=True, kw_only=True)
class SlowRate:
    """How slow an emulated link between domains is. Each rank has one of its own, in both directions at once.

    Attributes:
        megabytes_per_second: 0 for no limit.
        delay_us: of every collective that crosses it.
    """

    megabytes_per_second: int = 0
    delay_us: int = 0

    def transfer_seconds(self, num_bytes: int) -> float:
        """Return how long the link is busy with `num_bytes`; the delay comes on top."""
        rate = 1e6 * self.megabytes_per_second
        return num_bytes / rate if rate else 0.0


@dataclass(frozen=True, kw_only=True)
class GroupShape:
    """The ranks of one group.

    Attributes:
        slot_ranges: (start, stop) of each rank, as in `ExpertPlacement`.
        domain_sizes: how many consecutive ranks sit in each domain; empty: all in one.
        slow: the link between domains is slowed down to this; None leaves it as it is.
    """

    slot_ranges: tuple[tuple[int, int], ...]
    domain_sizes: tuple[int, ...] = ()
    slow: SlowRate | None = None

    def __post_init__(self) -> None:
        assert not self.domain_sizes or sum(self.domain_sizes) == self.num_ranks, (self.domain_sizes, self.num_ranks)
        assert all(size > 0 for size in self.domain_sizes), self.domain_sizes

    @property
    def num_ranks(self) -> int:
        """W."""
        return len(self.slot_ranges)

    @property
    def num_slots(self) -> int:
        """P."""
        return self.slot_ranges[-1][1]

    @cached_property
    def domains(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each domain, ascending."""
        found, first = [], 0
        for size in self.domain_sizes or (self.num_ranks,):
            found.append(tuple(range(first, first + size)))
            first += size
        return tuple(found)

    @cached_property
    def domain_of(self) -> tuple[int, ...]:
        """The domain of each rank."""
        return tuple(number for number, ranks in enumerate(self.domains) for _ in ranks)

    @cached_property
    def rails(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that talk to each other between domains: a place in a domain is on the rail of that number.

        There are as many rails as the smallest domain has ranks; in larger domains the places behind share them.

        Example:
            Domains (0, 1, 2), (3, 4): rails (0, 2, 3) and (1, 4).
        """
        width = min(len(ranks) for ranks in self.domains)
        return tuple(
            tuple(rank for ranks in self.domains for place, rank in enumerate(ranks) if place % width == rail)
            for rail in range(width)
        )

    def rail_of(self, rank: int) -> int:
        """Return the number of the rail that `rank` is on."""
        return next(number for number, ranks in enumerate(self.rails) if rank in ranks)

    def relays(self, rail: int) -> tuple[int, ...]:
        """Return, for each domain, the rank to which rows of `rail` go when they enter it."""
        return tuple(ranks[rail] for ranks in self.domains)

    def scopes(self, rank: int) -> list[int]:
        """Return how far each rank is from `rank`."""
        return [
            SAME_RANK if other == rank else IN_DOMAIN if domain == self.domain_of[rank] else BETWEEN_DOMAINS
            for other, domain in enumerate(self.domain_of)
        ]
