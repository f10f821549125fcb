"""/v1/topology/advice and /v1/topology/apply: what the advisor says of the layout that runs, and a change of it.

Not the advisor (topologies/advisor/) and not its windows (server/http/advising.py). Units: seconds, bytes, ratios.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...topologies.advisor.records import OBSERVING
from ..errors import invalid
from ..state import ServerState


def add_advice_routes(app: FastAPI, state: ServerState) -> None:
    """Add the routes."""

    @app.get("/v1/topology/advice")
    async def advice() -> Response:
        return JSONResponse(advice_view(state))

    @app.post("/v1/topology/apply")
    async def apply(request: Request, topology: str | None = None) -> Response:
        # Whoever names a layout where nobody reads it must not get the advised one instead.
        if others := [name for name in request.query_params if name != "topology"]:
            raise invalid(f"{others[0][:40]!r} is no parameter of this path; use topology=EPxDPy", "topology")
        if (await request.body()).strip() not in (b"", b"{}"):
            raise invalid("a body is not read here; name the layout in the URL: ?topology=EPxDPy", "topology")
        if state.layout_changer is None:
            state.require_ready()
        assert state.layout_changer is not None, "a server that is ready has replicas"
        await state.layout_changer.begin(topology)
        return JSONResponse(state.layout_changer.view(), 202)

    @app.get("/v1/topology/apply")
    async def progress() -> Response:
        changer = state.layout_changer
        return JSONResponse({"change": None if changer is None else changer.view()})


def advice_view(state: ServerState) -> dict[str, Any]:
    """Return the latest advice as JSON; before the first window has ended, that there is none yet."""
    interval = state.options.advice_interval_s
    if state.advice is None:
        running = state.config.parallel.topology
        nothing: dict[str, Any] = {
            "number": 0,
            "time": 0.0,
            "topology": running,
            "verdict": OBSERVING,
            "advised": running,
            "gain": 0.0,
        }
        why = f"no window has ended yet; one takes {interval:g} s"
        more: dict[str, Any] = {"reason": why, "candidates": [], "calibration": None, "excluded": []}
        return {**nothing, **more, "interval_seconds": interval}
    view: dict[str, Any] = msgspec.to_builtins(state.advice)
    return {**view, "interval_seconds": interval}
