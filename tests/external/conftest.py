"""A demo server for clients that others wrote, and where those clients are."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.server_process import ServerProcess
from tests.support.tool_templates import TEMPLATES

HERE = Path(__file__).parent
CLIENT_TIMEOUT_S = 240


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The demo, whose own template knows no tools, with one that does."""
    template = tmp_path_factory.mktemp("template") / "hermes.jinja"
    template.write_text(TEMPLATES["hermes"])
    flags = ("--kv-cache-memory-bytes", "64MiB", "--chat-template", str(template), "--max-model-len", "512")
    with ServerProcess("demo", *flags) as process:
        yield process


def python_with(package: str) -> str:
    """Return an interpreter that has `package`, or skip the test."""
    named = os.environ.get("MOEWE_EXTERNAL_PYTHON")
    python = named or str(HERE.parents[1] / ".external" / "bin" / "python")
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    # Clients of others pin what the project's environment pins otherwise, so they live in one of their own or nowhere.
    if not Path(python).exists() or subprocess.run([python, "-c", code], check=False).returncode:
        pytest.skip(f"{package} is not installed in {python}; see tests/external/README.md")
    return python


def run_client(command: list[str], **options: Any) -> str:
    """Run a client and return what it printed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=CLIENT_TIMEOUT_S, check=False, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture
def ask_python(server: ServerProcess) -> Callable[[str, str], dict[str, Any]]:
    """Run a script of clients/ that needs `package`; return the JSON of its last line."""

    def ask(package: str, script: str) -> dict[str, Any]:
        printed = run_client([python_with(package), str(HERE / "clients" / script), f"{server.url}/v1"])
        return json.loads(printed.splitlines()[-1])

    return ask


@pytest.fixture
def ask_node(server: ServerProcess) -> Callable[[str], dict[str, Any]]:
    """Run a script of clients/ with node; return the JSON of its last line."""

    def ask(script: str) -> dict[str, Any]:
        node = shutil.which("node")
        modules = Path(os.environ.get("MOEWE_NODE_MODULES") or HERE / "node_modules")
        # Neither node nor its packages come with pip; what their client asks for, Python's openai asks for too.
        if node is None:
            pytest.skip("node is not installed")
        if not (modules / "openai").is_dir():
            pytest.skip(f"openai is not installed in {modules}; see tests/external/README.md")
        environment = os.environ | {"OPENAI_MODULE": str(modules / "openai" / "index.mjs")}
        printed = run_client([node, str(HERE / "clients" / script), f"{server.url}/v1"], env=environment)
        return json.loads(printed.splitlines()[-1])

    return ask
