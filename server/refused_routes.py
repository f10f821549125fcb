"""Routes that OpenAI and other servers have and this one has not: each says so, and what to use.

Not an unknown path, which is a plain 404. Units: HTTP status codes.
"""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from .errors import ApiError

_VECTORS = "this server generates text and makes no vectors or scores; ask a server of an embedding model"
_MEDIA = "this server reads and writes text alone"
# Path -> what to do instead.
REFUSED = {
    "/v1/embeddings": _VECTORS,
    "/v1/rerank": _VECTORS,
    "/rerank": _VECTORS,
    "/v1/score": _VECTORS,
    "/score": _VECTORS,
    "/pooling": _VECTORS,
    "/classify": _VECTORS,
    "/v1/moderations": _VECTORS,
    "/v1/responses": "use /v1/chat/completions",
    "/v1/messages": "use /v1/chat/completions",
    "/v1/assistants": "use /v1/chat/completions",
    "/v1/threads": "use /v1/chat/completions",
    "/v1/edits": "use /v1/completions",
    "/v1/batches": "use the command moewe run-batch, which reads files of the same format",
    "/v1/files": "use the command moewe run-batch, which reads files of the same format",
    "/v1/fine_tuning/jobs": "this server trains nothing",
    "/v1/audio/speech": _MEDIA,
    "/v1/audio/transcriptions": _MEDIA,
    "/v1/audio/translations": _MEDIA,
    "/v1/images/generations": _MEDIA,
    "/v1/images/edits": _MEDIA,
    "/v1/images/variations": _MEDIA,
    "/v1/load_lora_adapter": "adapters are not supported",
    "/v1/unload_lora_adapter": "adapters are not supported",
}
CODE = "unsupported_endpoint"


def add_refused_routes(app: FastAPI) -> None:
    """Add the routes; each is a 404 with the reason, whatever the method."""
    for path in REFUSED:
        app.router.add_route(path, _refuse, methods=["GET", "POST"], include_in_schema=False)


async def _refuse(request: Request) -> Response:
    path = request.url.path
    raise ApiError(404, f"{path} is not supported; {REFUSED[path]}", code=CODE)
