"""/v1/trace: record where the time of the next steps goes, on every replica and rank, as a file for Perfetto.

Not the recording (runtime/step_recorder.py) and not the file (server/trace/chrome.py). One trace at a time; it ends
with its steps, when no step comes any more, after MOST_SECONDS, or when its client goes away.
Units: seconds, steps of one replica.
"""

from __future__ import annotations

import asyncio
import time

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from ...runtime.trace_session import TraceSession
from ..errors import ApiError, invalid
from ..intake.token_ids import in_thread
from ..options import VERSION
from ..state import ServerState
from ..trace.chrome import TraceFacts, chrome_trace
from ..trace.limits import (
    DEFAULT_IDLE_SECONDS,
    DEFAULT_STEPS,
    LEAST_IDLE_SECONDS,
    MOST_IDLE_SECONDS,
    MOST_SECONDS,
    MOST_STEPS,
)
from .streams import while_connected

_POLL_S = 0.05
_ANSWER_S = 5.0  # engines that are told to stop hand over what they have, between two steps


def add_trace_routes(app: FastAPI, state: ServerState) -> None:
    """Add the routes."""

    @app.post("/v1/trace")
    async def record(
        http: Request, steps: str = str(DEFAULT_STEPS), idle_timeout: str = str(DEFAULT_IDLE_SECONDS)
    ) -> Response:
        num_steps, idle_s = _steps(steps), _idle_timeout(idle_timeout)
        state.require_ready()
        await http.body()  # nothing is read from it, but only behind it can be heard that a client hangs up
        data = await while_connected(http.receive, _recorded(state, num_steps, idle_s))
        return Response(data, media_type="application/json")

    @app.get("/v1/trace")
    async def progress() -> Response:
        session = state.trace
        if session is None:
            return JSONResponse({"recording": False})
        return JSONResponse({"recording": True, "steps": session.num_steps, "recorded": session.steps})


def _steps(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and 1 <= int(text) <= MOST_STEPS):
        raise invalid(f"steps={text[:40]!r} is not allowed; use a whole number from 1 to {MOST_STEPS}", "steps")
    return int(text)


def _idle_timeout(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not LEAST_IDLE_SECONDS <= seconds <= MOST_IDLE_SECONDS:
        allowed = f"use seconds from {LEAST_IDLE_SECONDS} to {MOST_IDLE_SECONDS:.0f}"
        raise invalid(f"idle_timeout={text[:40]!r} is not allowed; {allowed}", "idle_timeout")
    return seconds


async def _recorded(state: ServerState, num_steps: int, idle_s: float) -> bytes:
    """Record and return the file."""
    assert state.begin_trace is not None, "a server that is ready has replicas"
    if state.trace is not None:
        raise ApiError(409, "a trace is being recorded already; wait until it is done", code="trace_running")
    session = state.trace = state.begin_trace(num_steps)
    try:
        ended = await _wait(session, idle_s)
        facts = TraceFacts(version=VERSION, model=state.names[0], topology=state.config.parallel.topology)
        traces = list(session.traces)
        return await in_thread(lambda: chrome_trace(traces, num_steps, ended, facts))
    finally:
        session.close()
        state.trace = None


async def _wait(session: TraceSession, idle_s: float) -> str:
    """Wait for the traces of all replicas; return why it ended before all steps were there, or nothing."""
    began = since = time.monotonic()
    seen = 0
    while not session.is_done:
        await asyncio.sleep(_POLL_S)
        now = time.monotonic()
        if (steps := sum(session.steps)) != seen:
            seen, since = steps, now
        if now - since > idle_s:
            waiting = ", ".join(str(i) for i, trace in enumerate(session.traces) if trace is None)
            return await _stopped(session, f"no step within {idle_s:g} s: idle, replica {waiting}")
        if now - began > MOST_SECONDS:
            return await _stopped(session, f"a trace ends after {MOST_SECONDS:.0f} s")
    return ""


async def _stopped(session: TraceSession, reason: str) -> str:
    session.stop()
    deadline = time.monotonic() + _ANSWER_S
    while not session.is_done and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)
    return reason
