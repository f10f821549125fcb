"""What an exchange moves and how long it takes, by how far rows go: within the rank, the domain, between domains.

Not a counter that is exported (telemetry/counters.py adds these up). One meter an exchange and rank.
Units: bytes that this rank sends (own rows that stay count as scope `rank`), seconds of the host's clock. A collective
is booked under the farthest scope that it reaches, waiting for slower ranks included, but not what runs while its rows
travel; what a rank does by itself is `rank`. On a GPU the host's clock says nothing about the device, so only bytes are
counted there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from ....telemetry import SCOPES

SAME_RANK, IN_DOMAIN, BETWEEN_DOMAINS = range(len(SCOPES))

Result = TypeVar("Result")


@dataclass(frozen=True)
class Traffic:
    """Of one rank: bytes and seconds, an entry a scope.

    `waited_seconds` are those of them in which nothing travelled, where that is known: a rank waited for another.
    """

    num_bytes: tuple[int, ...] = (0,) * len(SCOPES)
    seconds: tuple[float, ...] = (0.0,) * len(SCOPES)
    waited_seconds: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            tuple(a + b for a, b in zip(self.num_bytes, other.num_bytes, strict=True)),
            tuple(a + b for a, b in zip(self.seconds, other.seconds, strict=True)),
            self.waited_seconds + other.waited_seconds,
        )


class TrafficMeter:
    """Adds up until it is read."""

    def __init__(self) -> None:
        self._bytes = [0] * len(SCOPES)
        self._seconds = [0.0] * len(SCOPES)

    def count(self, scope: int, num_bytes: int) -> None:
        """Book bytes that this rank sends."""
        self._bytes[scope] += num_bytes

    def add(self, traffic: Traffic) -> None:
        """Book what somebody else has added up."""
        self._bytes = [a + b for a, b in zip(self._bytes, traffic.num_bytes, strict=True)]
        self._seconds = [a + b for a, b in zip(self._seconds, traffic.seconds, strict=True)]

    def count_seconds(self, scope: int, seconds: float) -> None:
        """Book time that somebody else has measured."""
        self._seconds[scope] += seconds

    @contextmanager
    def collective(self, scope: int, device: torch.device) -> Iterator[None]:
        """Book the time of what runs inside under `scope`."""
        begin = time.perf_counter()
        yield
        if device.type != "cuda":
            self._seconds[scope] += time.perf_counter() - begin

    @contextmanager
    def own_work(self, device: torch.device) -> Iterator[None]:
        """Book the time of what runs inside as this rank's own, less that of collectives in it."""
        begin, elsewhere = time.perf_counter(), sum(self._seconds)
        yield
        if device.type != "cuda":
            self._seconds[SAME_RANK] += time.perf_counter() - begin - (sum(self._seconds) - elsewhere)

    def waiting(
        self, pending: Callable[[], torch.Tensor], scope: int, device: torch.device
    ) -> Callable[[], torch.Tensor]:
        """Return `pending`, which books the time that somebody waits in it under `scope`."""

        def wait() -> torch.Tensor:
            with self.collective(scope, device):
                return pending()

        return wait

    def stages(self, stages: Generator[str, None, Result], device: torch.device) -> Generator[str, None, Result]:
        """Take `stages` and book each of them as `own_work` does; what others do between two of them is not booked."""
        while True:
            with self.own_work(device):
                try:
                    travelling = next(stages)
                except StopIteration as end:
                    result: Result = end.value
                    return result
            yield travelling

    def take(self) -> Traffic:
        """Return what was booked since the last call."""
        traffic = Traffic(tuple(self._bytes), tuple(self._seconds))
        self._bytes = [0] * len(SCOPES)
        self._seconds = [0.0] * len(SCOPES)
        return traffic
