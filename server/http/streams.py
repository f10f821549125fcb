"""Carries answers to clients, as one body or as server-sent events, and notices within moments when a client is gone.

Not the content (server/answers/answer.py). Events go out in the order of deltas; `data: [DONE]` ends a stream that
succeeded, an error event one that failed. What waits for a slow client is bounded by its own `max_tokens`.
Units: bytes on the wire.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...runtime import messages
from ...runtime.messages import Delta
from ..answers.answer import Answer, event
from ..errors import ApiError, invalid, queue_full, server_error, unavailable
from .connections import Lane, lane_of

_Result = TypeVar("_Result")


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run `work` until it ends or the client hangs up; then cancel it and raise ClientGone.

    The request body must have been read.
    """
    job = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_hung_up(receive))
    try:
        await asyncio.wait({job, watch}, return_when=asyncio.FIRST_COMPLETED)
        if job.done():
            return job.result()
        raise ClientGone
    finally:
        for task in (job, watch):
            task.cancel()
        await asyncio.gather(job, watch, return_exceptions=True)


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def collect(answer: Answer) -> dict[str, Any]:
    """Wait for all prompts of an answer and return its body; raise ApiError when one failed."""
    call = answer.call
    while True:
        for index, delta in call.take():
            failure = failed(delta)
            if failure is not None:
                raise failure
            answer.add(index, delta)
        if call.ended:
            return answer.body()
        await call.wait()


def failed(delta: Delta) -> ApiError | None:
    """Return the error that ends an answer, if this is one."""
    if delta.finish_reason == "abort":
        return server_error("the request was aborted by the server", "aborted")
    if delta.finish_reason != "error":
        return None
    message = delta.error or "the engine failed"
    match delta.error_code:
        case messages.INVALID_REQUEST:
            return invalid(message)
        case messages.INVALID_GRAMMAR | messages.GRAMMAR_STUCK:
            return invalid(message, code="invalid_grammar")
        case messages.QUEUE_FULL:
            return queue_full(message)
        case messages.ENGINE_BUSY | messages.SHUTTING_DOWN as code:
            return unavailable(message, code)
    return server_error(message, "engine_error")


class EventStream(Response):
    """A streamed answer. It owns the call and closes it.

    Args:
        answer: what to send.
    """

    media_type = "text/event-stream"

    def __init__(self, answer: Answer) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; end at once when the client hangs up."""
        try:
            await while_connected(receive, self._send_all(send, lane_of(scope)))
        except ClientGone:
            return
        finally:
            self._answer.call.close()

    async def _send_all(self, send: Send, lane: Lane | None) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        opening = b"".join(map(event, self._answer.opening()))
        if opening:
            await send({"type": "http.response.body", "body": opening, "more_body": True})
        last = await (self._send_news(send) if lane is None else self._write_news(lane))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_news(self, send: Send) -> bytes:
        """Send events as they come; return the last ones."""
        while True:
            data, is_last = self._news()
            if is_last:
                return data
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await self._answer.call.wait()

    async def _write_news(self, lane: Lane) -> bytes:
        """The same for a lane. No task wakes for it: events are written where deltas arrive."""
        last: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def write() -> None:
            if last.done():
                return
            try:
                data, is_last = self._news()
            except Exception as error:  # of this answer; deltas of others arrive by the same way
                last.set_exception(error)
                return
            if is_last:
                last.set_result(data)
            elif data:
                lane.write(data)

        self._answer.call.on_news = write
        write()  # what has come meanwhile
        return await last

    def _news(self) -> tuple[bytes, bool]:
        """Return the events of what has come, and whether they are the last ones."""
        answer, data = self._answer, b""
        for index, delta in answer.call.take():
            failure = failed(delta)
            if failure is not None:
                return data + event(failure.body()), True
            data += answer.events(index, delta)
        if not answer.call.ended:
            return data, False
        return data + b"".join(map(event, answer.closing())) + b"data: [DONE]\n\n", True
