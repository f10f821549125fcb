"""The door of the HTTP server: a place, an API key, and size and pace of bodies.

Not routing: it stands before every route, known or not, so that no spelling of a path gets around it.
Units: bytes, seconds.
"""

from __future__ import annotations

import asyncio
import time

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..asker import ASKER, asker_of
from ..errors import ApiError, unavailable
from ..state import ServerState
from .connections import NO_PLACE
from .docs_page import DOCS_PATHS
from .keys import KeyCheck
from .page import PAGE_PATHS

# Probes of an orchestrator cannot always carry a key, and these two tell nothing but up or down.
PROBE_PATHS = frozenset({"/health", "/ready"})
# What is open to everybody: exactly these spellings, to read. The pages hold no data; one asks for the key itself.
OPEN_PATHS = PROBE_PATHS | PAGE_PATHS | DOCS_PATHS
OPEN_METHODS = frozenset({"GET", "HEAD"})
BODY_PAUSE_S = 30.0
# Beyond the first pause allowed, a body must come at least this fast: a byte now and then is no progress.
BODY_BYTES_PER_S = 16 * 1024


class Guard:
    """ASGI middleware.

    Args:
        app: what stands behind the door.
        state: for its options.
    """

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._keys = KeyCheck(state.options.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await _answer(send, refusal)
            return
        ASKER.set(asker_of(scope["headers"], (scope.get("client") or ("",))[0], keyed=self._keys.asks))
        await self._app(_in_origin_form(scope), _Body(receive, self._state.options.max_body_bytes), send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        limit = scope.get("state", {}).get(NO_PLACE)
        if limit is not None and scope["path"] not in PROBE_PATHS:
            text = f"{limit} connections are open and that is the limit (--limit-concurrency); try again later"
            refusal = unavailable(text, "too_many_connections")
            refusal.headers |= _CLOSE
            return refusal
        is_open = scope["path"] in OPEN_PATHS and scope["method"] in OPEN_METHODS
        if self._keys.asks and not is_open and not self._keys.accepts(scope["headers"]):
            return ApiError(
                401, "no valid API key; send the header 'Authorization: Bearer KEY'",
                code="invalid_api_key", headers={"www-authenticate": "Bearer"},
            )  # fmt: skip
        headers = dict(scope["headers"])
        if b"content-length" in headers and b"transfer-encoding" in headers:
            # A proxy in front may go by the other one, and take what follows for part of this body, or the reverse.
            text = "content-length and transfer-encoding exclude each other; send one of them"
            return ApiError(400, text, headers=_CLOSE)
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._state.options.max_body_bytes:
            return too_large(self._state.options.max_body_bytes)
        return None


def _in_origin_form(scope: Scope) -> Scope:
    """Return `scope` with the path alone where a client sends the whole URL, as it may (RFC 9112, 3.2.2)."""
    path: str = scope["path"]
    scheme, found, rest = path.partition("://")
    if not found or scheme.lower() not in ("http", "https"):
        return scope
    raw_rest = scope.get("raw_path", path.encode()).partition(b"://")[2]
    raw_path = b"/" + raw_rest.partition(b"/")[2]
    return {**scope, "path": "/" + rest.partition("/")[2], "raw_path": raw_path}


class _Body:
    """`receive` of one request, with a limit on the size of its body and on the time that it may take to arrive.

    A pause longer than BODY_PAUSE_S ends it, and so does a whole that comes slower than BODY_BYTES_PER_S.
    """

    def __init__(self, receive: Receive, most: int) -> None:
        self._receive = receive
        self._most = most
        self._size = 0
        self._complete = False
        self._began = time.monotonic()

    async def __call__(self) -> Message:
        if self._complete:
            return await self._receive()
        try:
            left = self._began + BODY_PAUSE_S + self._size / BODY_BYTES_PER_S - time.monotonic()
            message = await asyncio.wait_for(self._receive(), max(0.0, min(BODY_PAUSE_S, left)))
        except TimeoutError:
            text = f"the request body came too slowly: {self._size} bytes in {time.monotonic() - self._began:.1f} s"
            raise ApiError(408, f"{text}; send it without pauses", code="body_timeout", headers=_CLOSE) from None
        if message["type"] == "http.request":
            self._size += len(message.get("body", b""))
            self._complete = not message.get("more_body", False)
            if self._size > self._most:
                raise too_large(self._most)
        return message


_CLOSE = {"connection": "close"}


def too_large(most: int) -> ApiError:
    """Return the error for a body of more than `most` bytes. The rest of it is not read."""
    return ApiError(
        413, f"the request body is larger than {most} bytes; send less", code="body_too_large", headers=_CLOSE
    )


async def _answer(send: Send, error: ApiError) -> None:
    body = msgspec.json.encode(error.body())
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
