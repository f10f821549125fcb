"""The body of a request: read only when requests are taken, and only as JSON.

Not its size and pace (server/http/guard.py) and not its fields (server/protocol/strict.py). Units: bytes.
"""

from __future__ import annotations

import re

from fastapi import Request

from ..errors import invalid
from ..state import ServerState

_CHARSET = re.compile(r"charset\s*=\s*\"?([^\s;\"]*)")
_CHARSETS = frozenset({"utf-8", "utf8", "us-ascii", "ascii"})


async def read_body(state: ServerState, http: Request) -> bytes:
    """Return the body, or raise ApiError."""
    state.require_ready()
    kind, _, parameters = http.headers.get("content-type", "application/json").lower().partition(";")
    kind = kind.strip()
    if kind != "application/json":
        raise invalid(f"content-type {kind[:80]!r} is not read here; send 'content-type: application/json'")
    charset = _CHARSET.search(parameters)
    if charset and charset[1] not in _CHARSETS:
        raise invalid(f"content-type with charset {charset[1][:80]!r} is not read here; send JSON as UTF-8")
    coding = http.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise invalid(f"content-encoding {coding[:80]!r} is not read here; send the body as it is")
    return await http.body()
