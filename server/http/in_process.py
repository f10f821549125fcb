"""A request to the application without a socket: the very routes, checks and errors of the HTTP server.

Not a client of other servers (server/bench/client.py). One whole answer; streams are collected too.
Units: bytes; HTTP status codes.
"""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

from starlette.types import ASGIApp


async def post(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """Return status and body of the answer to a POST of JSON."""
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": None,
    }
    sent = False
    status = 0
    parts: list[bytes] = []

    async def receive() -> MutableMapping[str, Any]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.Event().wait()  # nobody hangs up here; who waits is cancelled when the answer is complete
        raise AssertionError

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    try:
        await app(scope, receive, send)
    except Exception:
        if not status:  # else it is the bug that the answer, a 500, tells of; the routes have logged it
            raise
    return status, b"".join(parts)
