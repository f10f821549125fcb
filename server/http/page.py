"""The built-in web page and its files, read at start and served under fixed names with a strict policy.

Not an application framework: no templates, no build step, no data of ours in the files. Whoever opens the page asks the
API with a key of his own. Units: bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from importlib import resources
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

# Nothing from elsewhere, no inline script or style, no frame around it, no form that leads away.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/static/chat.css": ("chat.css", "text/css; charset=utf-8"),
    "/static/docs.css": ("docs.css", "text/css; charset=utf-8"),
    "/static/chat.js": ("chat.js", "text/javascript; charset=utf-8"),
    "/static/icon.svg": ("icon.svg", "image/svg+xml"),
}
PAGE_PATHS = frozenset(_FILES)


def add_page(app: FastAPI) -> None:
    """Add the routes of the page, and of the style of the one at /docs."""
    folder = resources.files(__package__).joinpath("static")
    for path, (name, kind) in _FILES.items():
        app.add_api_route(path, _sender(folder.joinpath(name).read_bytes(), kind), methods=["GET", "HEAD"],
                          include_in_schema=False)  # fmt: skip


def _sender(content: bytes, kind: str) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    async def send(_: Request) -> Response:
        return Response(content, headers={**PAGE_HEADERS, "content-type": kind})

    return send
