"""Random requests, made from the server's own description of its API: none may be answered with a 5xx."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.external.conftest import python_with, run_client
from tests.support.server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.spawn]

SECONDS = 20


def test_no_random_request_breaks_the_server(server: ServerProcess, tmp_path: Path) -> None:
    python = python_with("schemathesis")
    command = [str(Path(python).with_name("st")), "run", f"{server.url}/openapi.json", "-c", "not_a_server_error"]
    command += ["--max-time", str(SECONDS), "-w", "2", "--no-shrink", "--no-color", "--generation-database", "none"]
    printed = run_client([*command, "--request-timeout", "60", "--phases", "fuzzing"], cwd=tmp_path)
    assert "/v1/chat/completions" in server.get("/openapi.json").text and "Fuzzing" in printed
    server.wait_idle(within=10.0)
    assert server.status("/ready") == 200 and "failed:" not in server.log()
