"""The body of a request: read only when requests are taken, and only as JSON.

Not its size and pace (server/guard.py) and not its fields (server/strict.py). Units: bytes.
"""

from __future__ import annotations

from fastapi import Request

from .errors import invalid
from .state import ServerState


async def read_body(state: ServerState, http: Request) -> bytes:
    """Return the body, or raise ApiError."""
    state.require_ready()
    kind = http.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise invalid(f"content-type {kind[:80]!r} is not read here; send 'content-type: application/json'")
    return await http.body()
