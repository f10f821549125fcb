"""Live requests of all clients: hands prompts to the replicas and brings each client what concerns it.

Not HTTP and not balancing (runtime/replicas.py). Everything here runs in the event loop.
Units: token ids, monotonic seconds. A `Call` is what one client asked at once: one prompt or several.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Sequence
from typing import Protocol

from ..runtime.messages import Delta
from ..runtime.metrics.export import Metrics, RequestTimes
from ..runtime.params import SamplingParams
from ..runtime.replicas import ReplicaLost
from .errors import invalid, queue_full, unavailable

log = logging.getLogger(__name__)


class Submitter(Protocol):
    """What the hub needs of runtime.replicas.ReplicaSet."""

    def submit(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, priority: int = 0
    ) -> None:
        """Hand a prompt to a replica."""
        ...

    def abort(self, request_id: str) -> None:
        """Forget a request; unknown ids are ignored."""
        ...


class Call:
    """The prompts of one client call and what came of them; made by `Hub.open`.

    Attributes:
        call_id: unique, part of the id that the client sees.
        num_tokens: tokens generated so far, by prompt.
    """

    def __init__(self, hub: Hub, call_id: str, times: list[RequestTimes]) -> None:
        self.call_id = call_id
        self.num_tokens = [0] * len(times)
        self._hub = hub
        self._times = times
        self._open = dict.fromkeys(range(len(times)))
        self._arrived: list[tuple[int, Delta]] = []
        self._waiter: asyncio.Future[None] | None = None

    def request_id(self, index: int) -> str:
        """Return the id under which prompt number `index` runs."""
        return f"{self.call_id}-{index}"

    async def next(self) -> list[tuple[int, Delta]]:
        """Wait for news; return all there are as (index of the prompt, delta). Empty when all prompts ended."""
        while not self._arrived and self._open:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        arrived, self._arrived = self._arrived, []
        return arrived

    def put(self, index: int, delta: Delta) -> None:
        """Take news of prompt number `index`."""
        if index not in self._open:
            return
        self._hub.metrics.observe(self._times[index], delta)
        self.num_tokens[index] += len(delta.token_ids)
        if delta.finish_reason is not None:
            del self._open[index]
        self._arrived.append((index, delta))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Forget the call; prompts that still run are aborted."""
        for index in self._open:
            self._hub.metrics.finished(self._times[index], "abort")
        self._hub.forget(self, list(self._open))
        self._open.clear()


class Hub:
    """All live calls.

    Args:
        metrics: where requests are counted.
        most_live: prompts that may run or wait at once; more are refused.
    """

    def __init__(self, metrics: Metrics, most_live: int) -> None:
        self.metrics = metrics
        self.replicas: Submitter | None = None
        self.most_live = most_live
        self._live: dict[str, tuple[Call, int]] = {}
        self._calls: dict[str, Call] = {}
        self._prefix = secrets.token_hex(6)
        self._numbers = itertools.count()

    @property
    def num_live(self) -> int:
        """Prompts whose end has not been told yet."""
        return len(self._live)

    @property
    def num_calls(self) -> int:
        """Client calls that are not answered completely."""
        return len(self._calls)

    def open(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], priority: int = 0) -> Call:
        """Submit the prompts of one client call, each with its parameters. The caller must close it."""
        assert self.replicas is not None
        if len(prompts) > self.most_live:
            raise invalid(
                f"prompts times n make {len(prompts)} outputs; send at most {self.most_live} at once",
                "n" if len(set(map(id, prompts))) == 1 else "prompt",
            )
        if self.num_live + len(prompts) > self.most_live:
            raise queue_full(
                f"{self.num_live} prompts run or wait already and the limit is {self.most_live}; try again later "
                "(--max-queued-requests sets how many may wait)"
            )
        times = [self.metrics.submitted(len(prompt)) for prompt in prompts]
        call = Call(self, f"{self._prefix}{next(self._numbers):08x}", times)
        self._calls[call.call_id] = call
        log.debug("runs as %s", call.call_id)  # the id that engines know, beside the client's own
        try:
            for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
                self._live[call.request_id(index)] = (call, index)
                self.replicas.submit(call.request_id(index), prompt, own, priority)
        except BaseException as error:
            call.close()
            if isinstance(error, ReplicaLost):
                raise unavailable(str(error), "engine_lost") from None
            raise
        return call

    def on_delta(self, delta: Delta) -> None:
        """Bring a delta to its call; of requests that were given up it is dropped."""
        entry = self._live.get(delta.request_id)
        if entry is None:
            return
        if delta.finish_reason is not None:
            del self._live[delta.request_id]
        entry[0].put(entry[1], delta)

    def fail_all(self, reason: str) -> None:
        """End every live request with an error."""
        for request_id in list(self._live):
            self.on_delta(Delta(request_id=request_id, finish_reason="error", error=reason))

    def forget(self, call: Call, running: Sequence[int]) -> None:
        """Drop a call and abort what of it still runs."""
        self._calls.pop(call.call_id, None)
        for index in running:
            if self._live.pop(call.request_id(index), None) is not None and self.replicas is not None:
                self.replicas.abort(call.request_id(index))
