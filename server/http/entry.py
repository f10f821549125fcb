"""The outermost layer of the HTTP application: a request id in and out, a line a request in the log, errors counted.

Not the door (server/http/guard.py), which stands behind it. It sees every answer, those of the door and of crashes too.
Units: milliseconds in the log.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...telemetry.logs import about_request
from ..errors import CLIENT_GONE
from ..state import ServerState

log = logging.getLogger("moewe.access")

GENERATING_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
# Asked every few seconds by machines: told only at level debug.
QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})
MOST_SHOWN = 200
_REQUEST_ID = re.compile(rb"[\x20-\x7e]{1,128}")


class Entry:
    """ASGI middleware.

    Args:
        app: what answers.
        state: for its options and metrics.
    """

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._logs = not state.options.disable_access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on; its answer carries the id."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_in(scope["headers"])
        began, status = time.monotonic(), 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                kept = [pair for pair in message.get("headers", []) if pair[0] != b"x-request-id"]
                message = {**message, "headers": [*kept, (b"x-request-id", request_id.encode())]}
                if status >= 400 and status != CLIENT_GONE and scope["path"] in GENERATING_PATHS:
                    self._state.metrics.error(status)
            await send(message)

        with about_request(request_id):
            try:
                await self._app(scope, receive, sending)
            finally:
                if self._logs:
                    self._tell(scope, status, time.monotonic() - began)

    def _tell(self, scope: Scope, status: int, seconds: float) -> None:
        level = logging.DEBUG if scope["path"] in QUIET_PATHS else logging.INFO
        if log.isEnabledFor(level):
            # The raw path: as it came, percent signs and all; without the query, where some put keys.
            path = scope.get("raw_path", b"").decode("ascii", "replace")[:MOST_SHOWN]
            host = (scope.get("client") or ("-",))[0]
            log.log(level, "%s %s %s %s %.1f ms", host, scope["method"][:20], path, status or "-", 1e3 * seconds)


def request_id_in(headers: Sequence[tuple[bytes, bytes]]) -> str:
    """Return the one X-Request-Id of a request if it is 1 to 128 printable ASCII characters, else a fresh one."""
    given = [value for name, value in headers if name == b"x-request-id"]
    if len(given) == 1 and _REQUEST_ID.fullmatch(given[0]) and given[0].strip():
        return given[0].decode("ascii")
    return secrets.token_hex(16)
