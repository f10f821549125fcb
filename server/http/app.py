"""The routes: what each path answers.

Not the checks (protocol, intake), not the answers' content (answers) and not the life of the process (serve).
Units: as OpenAI's API.
"""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

from ...text.one_line import shorten
from ..answers.answer import Answer, Shape
from ..answers.chat import ChatAnswer
from ..answers.completion import CompletionAnswer
from ..errors import CLIENT_GONE, ApiError, invalid, server_error
from ..hub import Call
from ..intake.token_ids import Intake, chat_intake, completion_intake
from ..options import VERSION
from ..protocol.requests import ChatRequest, CompletionRequest, GenerationRequest
from ..protocol.strict import parse
from ..state import Phase, ServerState
from .advice_routes import add_advice_routes
from .bodies import read_body
from .cors import with_origins
from .docs_page import add_docs
from .entry import Entry
from .guard import Guard
from .page import add_page
from .refused_routes import add_refused_routes
from .streams import ClientGone, EventStream, collect, while_connected
from .token_routes import add_token_routes
from .topology_view import topology_drawing, topology_map
from .trace_routes import add_trace_routes

log = logging.getLogger(__name__)


def build_app(state: ServerState) -> ASGIApp:
    """Return the application over `state`; it serves /health from the first moment.

    The layers stand around all routes, and around the answer to a crash too: first the request's id, then other
    origins (their browsers must be able to read a 401), then the door.
    """
    return Entry(with_origins(Guard(build_routes(state), state), state.options), state)


def build_routes(state: ServerState) -> FastAPI:
    """Return the routes without the layers that guard them."""
    app = FastAPI(title="moewe", version=VERSION, redirect_slashes=False, openapi_url=None)
    app.state.moewe = state
    _add_error_handlers(app)
    _add_status_routes(app, state)
    _add_model_routes(app, state)
    _add_generation_routes(app, state)
    add_token_routes(app, state)
    add_trace_routes(app, state)
    add_advice_routes(app, state)
    add_refused_routes(app)
    add_docs(app, state)
    add_page(app)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return JSONResponse(error.body(), error.status, headers=error.headers)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        text = f"{request.method} {shorten(request.url.path, 200)} is not served here ({error.detail})"
        allowed = Headers(error.headers).get("allow")
        text += f"; use {allowed}" if allowed else ""
        body = ApiError(error.status_code, text, code="not_found" if error.status_code == 404 else None).body()
        return JSONResponse(body, error.status_code, headers=dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        log.error("%s %s failed: %s: %s", request.method, request.url.path, type(error).__name__, error)
        return JSONResponse(server_error("the server failed to handle this request; its log tells more").body(), 500)

    @app.exception_handler(ClientGone)
    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)


def _add_status_routes(app: FastAPI, state: ServerState) -> None:
    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        if state.phase is Phase.FAILED:
            return JSONResponse({"status": "failed", "reason": state.problem}, 503)
        return JSONResponse({"status": "ok" if state.phase is Phase.READY else state.phase.value})

    @app.api_route("/ready", methods=["GET", "HEAD"])
    async def ready() -> Response:
        try:
            state.require_ready()
        except ApiError as error:
            return JSONResponse({"status": state.phase.value}, 503, headers=error.headers)
        return JSONResponse({"status": "ready"})

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": VERSION})

    @app.get("/metrics")
    async def metrics() -> Response:
        state.refresh()
        return Response(state.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/topology")
    async def topology(format: str = "json") -> Response:
        if format not in ("json", "text"):
            raise invalid(f"format={format[:40]!r} is not known; use json or text", "format")
        state.refresh()
        return PlainTextResponse(topology_drawing(state)) if format == "text" else JSONResponse(topology_map(state))


def _add_model_routes(app: FastAPI, state: ServerState) -> None:
    def card(name: str) -> dict[str, Any]:
        body = {"id": name, "object": "model", "created": state.started, "owned_by": "moewe", "root": state.names[0]}
        return {**body, "max_model_len": state.max_model_len}

    @app.get("/v1/models")
    async def models() -> Response:
        state.require_ready()
        return JSONResponse({"object": "list", "data": [card(name) for name in state.names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        state.require_ready()
        state.require_model(name)
        return JSONResponse(card(name))


def _add_generation_routes(app: FastAPI, state: ServerState) -> None:
    @app.post("/v1/completions")
    async def completions(http: Request) -> Response:
        request = parse(CompletionRequest, await read_body(state, http))

        async def answer() -> Answer:
            intake = await completion_intake(state, request)
            return CompletionAnswer(_open(state, intake), _shape(state, request, intake))

        return await _respond(state, http, request, answer)

    @app.post("/v1/chat/completions")
    async def chat(http: Request) -> Response:
        request = parse(ChatRequest, await read_body(state, http))

        async def answer() -> Answer:
            intake = await chat_intake(state, request)
            return ChatAnswer(_open(state, intake), _shape(state, request, intake), reading=intake.reading)

        return await _respond(state, http, request, answer)


async def _respond(state: ServerState, http: Request, request: GenerationRequest, answer: Any) -> Response:
    state.require_model(request.model)

    async def whole() -> dict[str, Any]:
        ready = await answer()
        try:
            return await collect(ready)
        finally:
            ready.call.close()

    if request.stream:
        return EventStream(await while_connected(http.receive, answer()))
    return JSONResponse(await while_connected(http.receive, whole()))


def _open(state: ServerState, intake: Intake) -> Call:
    state.require_ready()  # tokenising took its time
    return state.hub.open(intake.prompts, intake.params.choices(), intake.priority)


def _shape(state: ServerState, request: GenerationRequest, intake: Intake) -> Shape:
    return Shape(
        model=request.model or "",
        tokenizer=state.tokenizer,
        prompts=intake.prompts,
        echo=intake.echo,
        n=intake.params.n,
        top=intake.params.logprobs,
        prompt_top=request.prompt_logprobs,
        include_usage=request.include_usage,
        continuous_usage=request.continuous_usage,
        token_ids=bool(request.return_token_ids),
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
        skip_special_tokens=intake.params.skip_special_tokens,
    )
