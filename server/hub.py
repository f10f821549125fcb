"""Live requests of all clients: hands prompts to the replicas and brings each client what concerns it.

Not HTTP and not balancing (runtime/replicas.py). Everything here runs in the event loop.
Units: token ids, monotonic seconds. A `Call` is what one client asked at once: one prompt or several.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ..runtime.messages import Delta
from ..runtime.metrics.export import Metrics, RequestTimes
from ..runtime.params import SamplingParams
from ..runtime.prompts import packed
from ..runtime.replicas import ReplicaLost
from .errors import invalid, queue_full, unavailable

log = logging.getLogger(__name__)

# The number of a prompt within its call, and what became known of it.
News = tuple[int, Delta]


class Submitter(Protocol):
    """What the hub needs of runtime.replicas.ReplicaSet."""

    def submit(self, request_id: str, prompt: bytes, params: SamplingParams, priority: int = 0) -> None:
        """Hand a prompt, `packed`, to a replica."""
        ...

    def abort(self, request_id: str) -> None:
        """Forget a request; unknown ids are ignored."""
        ...


class Call:
    """The prompts of one client call and what came of them; made by `Hub.open`.

    Attributes:
        call_id: unique, part of the id that the client sees.
        num_tokens: tokens generated so far, by prompt.
        on_news: called once for all news that come together; they wait for `take`.
    """

    def __init__(self, hub: Hub, call_id: str, times: list[RequestTimes]) -> None:
        self.call_id = call_id
        self.num_tokens = [0] * len(times)
        self.on_news: Callable[[], None] = _nobody
        self._hub = hub
        self._times = times
        self._open = dict.fromkeys(range(len(times)))
        self._arrived: list[News] = []

    @property
    def ended(self) -> bool:
        """True when all prompts ended, so that nothing will come any more."""
        return not self._open

    def request_id(self, index: int) -> str:
        """Return the id under which prompt number `index` runs."""
        return f"{self.call_id}-{index}"

    def take(self) -> list[News]:
        """Return what has come since the last time."""
        arrived, self._arrived = self._arrived, []
        return arrived

    async def wait(self) -> None:
        """Wait until there is something to take, or all prompts ended."""
        if self._arrived or self.ended:
            return
        come = asyncio.Event()
        self.on_news = come.set
        await come.wait()

    def put(self, news: Sequence[News]) -> None:
        """Take news of prompts."""
        for index, delta in news:
            if index not in self._open:
                continue
            self._hub.metrics.observe(self._times[index], delta)
            self.num_tokens[index] += len(delta.token_ids)
            if delta.finish_reason is not None:
                del self._open[index]
            self._arrived.append((index, delta))
        self.on_news()

    def close(self) -> None:
        """Forget the call; prompts that still run are aborted."""
        for index in self._open:
            self._hub.metrics.finished(self._times[index], "abort")
        self._hub.forget(self, list(self._open))
        self._open.clear()


def _nobody() -> None:
    """Nobody waits yet."""


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

    def open(self, prompts: Sequence[Sequence[int]], choices: Sequence[SamplingParams], priority: int = 0) -> Call:
        """Submit what one client call asks; the caller must close it.

        Args:
            prompts: token ids of the model, checked.
            choices: how to continue each of the prompts, once for each. They are numbered prompt by prompt.
            priority: lower runs first.
        """
        assert self.replicas is not None
        count = len(prompts) * len(choices)
        if count > self.most_live:
            raise invalid(
                f"prompts times n make {count} outputs; send at most {self.most_live} at once",
                "n" if len(prompts) == 1 else "prompt",
            )
        if self.num_live + count > self.most_live:
            raise queue_full(
                f"{self.num_live} prompts run or wait already and the limit is {self.most_live}; try again later "
                "(--max-queued-requests sets how many may wait)"
            )
        outputs = itertools.product(map(packed, prompts), choices)
        times = [self.metrics.submitted(len(prompt)) for prompt in prompts for _ in choices]
        call = Call(self, f"{self._prefix}{next(self._numbers):08x}", times)
        self._calls[call.call_id] = call
        log.debug("runs as %s", call.call_id)  # the id that engines know, beside the client's own
        try:
            for index, (prompt, params) in enumerate(outputs):
                self._live[call.request_id(index)] = (call, index)
                self.replicas.submit(call.request_id(index), prompt, params, priority)
        except BaseException as error:
            call.close()
            if isinstance(error, ReplicaLost):
                raise unavailable(str(error), "engine_lost") from None
            raise
        return call

    def on_deltas(self, deltas: Iterable[Delta]) -> None:
        """Bring deltas to their calls, each call all of its own at once; of requests given up they are dropped."""
        news: dict[Call, list[News]] = {}
        for delta in deltas:
            entry = self._live.get(delta.request_id)
            if entry is None:
                continue
            if delta.finish_reason is not None:
                del self._live[delta.request_id]
            call, index = entry
            news.setdefault(call, []).append((index, delta))
        for call, own in news.items():
            call.put(own)

    def fail_all(self, reason: str) -> None:
        """End every live request with an error."""
        self.on_deltas([Delta(request_id=name, finish_reason="error", error=reason) for name in self._live])

    def forget(self, call: Call, running: Sequence[int]) -> None:
        """Drop a call and abort what of it still runs."""
        self._calls.pop(call.call_id, None)
        for index in running:
            if self._live.pop(call.request_id(index), None) is not None and self.replicas is not None:
                self.replicas.abort(call.request_id(index))
