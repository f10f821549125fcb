"""Routes that OpenAI and other servers have and this one has not: each says so, and what to use.

Not the table (server/protocol/refused_paths.py) and not an unknown path, which is a plain 404. Units: HTTP status
codes.
"""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from ..errors import ApiError
from ..protocol.refused_paths import REFUSED

CODE = "unsupported_endpoint"


def add_refused_routes(app: FastAPI) -> None:
    """Add the routes; each is a 404 with the reason, whatever the method."""
    for path in REFUSED:
        app.router.add_route(path, _refuse, methods=["GET", "POST"], include_in_schema=False)


async def _refuse(request: Request) -> Response:
    path = request.url.path
    raise ApiError(404, f"{path} is not supported; {REFUSED[path]}", code=CODE)
