"""One connection of a client, with limits on what it may hold: a place, time for a header, time to read an answer.

Not HTTP itself (uvicorn and h11) and not bodies (server/http/guard.py). Whoever sends or reads nothing is cut off.
Units: seconds, connections.
"""

from __future__ import annotations

import asyncio

import h11
import msgspec
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import invalid

# From the connection, or from the first byte of a further request, until its header is whole.
HEADER_TIMEOUT_S = 30.0
# A client that takes nothing of its answer for this long.
WRITE_TIMEOUT_S = 120.0
# Connections beyond the limit are told so as long as there are no more than this; others are cut off unheard.
MOST_TOLD = 256
# In the `state` of a request's scope: it came by a connection beyond the limit (server/http/guard.py answers it).
NO_PLACE = "no_place"
_LANE = "lane"


class Lane:
    """Takes pieces of an answer's body straight to the wire, for answers that consist of thousands of them.

    What `send` of an application does with a piece that is not the last, past the layers around the routes (they look
    at heads alone) and past h11, whose state such a piece does not change. Only for answers in chunks.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def write(self, data: bytes) -> None:
        """Write a piece that is not empty, after others that the client has not read yet; nothing if it is gone."""
        transport = self._connection.transport
        if not transport.is_closing():
            transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def lane_of(scope: Scope) -> Lane | None:
    """Return the lane of the connection by which a request came.

    None without a connection of ours, and with HTTP/1.0, which knows no chunks.
    """
    lane: Lane | None = scope.get("state", {}).get(_LANE)
    return lane if scope.get("http_version") == "1.1" else None


class Connection(H11Protocol):
    """uvicorn's connection with deadlines. Its `limit_concurrency` counts open connections, idle ones too."""

    _header_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection; beyond the limit its request will be refused."""
        limit = self.config.limit_concurrency
        self.limit_concurrency = None  # uvicorn itself would answer without an error object
        super().connection_made(transport)
        beyond = 0 if limit is None else len(self.connections) - limit
        if beyond > MOST_TOLD:
            transport.abort()
            return
        self.app_state = {**self.app_state, _LANE: Lane(self)}
        if beyond > 0:
            self.app_state[NO_PLACE] = limit
        self._await_header()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._header_done()
        self._written()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes; a header that has begun must become whole in time."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._header_done()
        elif self._header_timer is None and not self.transport.is_closing():
            self._await_header()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request: with an error object, as everything else is."""
        error = invalid("this is no well-formed HTTP/1.1 request, or its header is too large", code="bad_request")
        body = msgspec.json.encode(error.body())
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def on_response_complete(self) -> None:
        """Until the first byte of a further request uvicorn's keep-alive timer counts."""
        self._header_done()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client reads slower than we write."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(WRITE_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        """It caught up."""
        self._written()
        super().resume_writing()

    def _await_header(self) -> None:
        self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self.transport.abort)

    def _header_done(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _written(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
