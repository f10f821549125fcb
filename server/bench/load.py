"""Sends samples at their times, holds the number at once, and ends early when told to.

Not one request (server/bench/client.py). Waiting for a place under the limit is not part of a request's time.
Units: seconds of time.perf_counter.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from .datasets import Sample
from .records import RequestRecord

Send = Callable[[Sample], Awaitable[RequestRecord]]
OnDone = Callable[[RequestRecord], None]


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """What a run gave.

    Attributes:
        records: of the requests that ended, in the order of their ends.
        duration: from the start to the last end, or to the stop.
        stopped: it was told to end early; what ran then is not in `records`.
        cpu_share: CPU seconds of this process per second: near 1 the client itself was the limit.
    """

    records: list[RequestRecord]
    duration: float
    stopped: bool
    cpu_share: float


async def run_load(
    samples: Sequence[Sample],
    arrivals: Sequence[float],
    send: Send,
    *,
    max_concurrency: int | None = None,
    on_done: OnDone = lambda record: None,
    stop: asyncio.Event | None = None,
) -> LoadResult:
    """Send every sample at its time and wait for all, or until `stop` is set.

    Args:
        arrivals: seconds after the start, ascending, one a sample.
        send: runs one request; it raises only when cancelled.
        max_concurrency: requests that run at once; None sets no limit.
        on_done: told of every end.
        stop: set it to end at once; what runs is cancelled.
    """
    records: list[RequestRecord] = []
    gate: Any = nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    halt = stop or asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()
    began, cpu = time.perf_counter(), time.process_time()

    async def one(sample: Sample) -> None:
        async with gate:
            record = await send(sample)
        records.append(record)
        on_done(record)

    async def all_of_them() -> None:
        for sample, at in zip(samples, arrivals, strict=True):
            wait = began + at - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            task = asyncio.ensure_future(one(sample))
            tasks.add(task)
        await asyncio.gather(*tasks)

    job, stopper = asyncio.ensure_future(all_of_them()), asyncio.ensure_future(halt.wait())
    try:
        await asyncio.wait({job, stopper}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        finished = job.done()
        stopper.cancel()
        job.cancel()
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await job
        await asyncio.gather(stopper, *tasks, return_exceptions=True)
    ended = max((record.ended for record in records), default=began) if finished else time.perf_counter()
    duration = ended - began
    share = (time.process_time() - cpu) / duration if duration > 0 else 0.0
    return LoadResult(records=records, duration=duration, stopped=not finished, cpu_share=share)
