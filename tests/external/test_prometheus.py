"""A real Prometheus scrapes a server under load: every panel has a series, every rule is taken and finds its series."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moewe.runtime.config import QUICK_VARIABLE
from moewe.runtime.metrics.monitoring import write_monitoring
from moewe.runtime.metrics.panels import ALERTS, ROWS
from tests.support.server_process import NAME, ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.spawn]
# What a CPU host has no series of.
ABSENT = (
    "moewe_measured_memory_bytes_total",
    "moewe_model_error_ratio",
    "energy_joules",  # counters of GPUs and, in a virtual machine, of the host
)


@pytest.fixture(scope="module")
def balancing() -> Iterator[ServerProcess]:
    """The demo with `--eplb auto`, which some panels are about."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus (Debian's package of that name) is not installed")
    flags = ("--kv-cache-memory-bytes", "64MiB", "--max-model-len", "512", "--eplb", "auto", "--price-per-hour", "2.5",
             "--advice-interval", "2")  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(QUICK_VARIABLE, raising=False)  # links are measured as for a user
        process = ServerProcess("demo", *flags)
    with process:
        yield process


@pytest.fixture(scope="module")
def prometheus(balancing: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Prometheus that scrapes the server each second and has our rules."""
    folder = tmp_path_factory.mktemp("prometheus")
    rules = write_monitoring(folder)[1]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {"job_name": "moewe", "static_configs": [{"targets": [balancing.url.removeprefix("http://")]}]}
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
               f"--web.listen-address=127.0.0.1:{port}"]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{url}/-/ready", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, "prometheus did not start"
                time.sleep(0.2)
        yield url
        process.terminate()


def ask(url: str, path: str, **query: str) -> Any:
    with urllib.request.urlopen(f"{url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=30) as answer:
        body = json.load(answer)
    assert body["status"] == "success", body
    return body["data"]


def generate(server: ServerProcess, **fields: Any) -> None:
    body = {"model": NAME, "prompt": "Once upon a time", "max_tokens": 24, "ignore_eos": True, "temperature": 0}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body | fields).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=240).close()


def test_every_panel_has_a_series_and_every_rule_is_taken(balancing: ServerProcess, prometheus: str) -> None:
    lines = [
        (panel.title, expression.replace("$instance", ".*").replace("$__rate_interval", "60s"))
        for _, row in ROWS
        for panel in row
        for expression, _ in panel.lines
        if not any(name in expression for name in ABSENT)
    ]
    # A rule has no result while nothing is wrong: what it asks for must be there.
    lines += [(a.name, each) for a in ALERTS for each in re.findall(r"\bmoewe_\w+(?:\{[^}]*\})?", a.expression)]
    with pytest.raises(urllib.error.HTTPError, match="400"):
        generate(balancing, temperature=-1)
    deadline = time.monotonic() + 240
    empty = lines
    while empty:
        generate(balancing)  # rates need two scrapes, shares a window
        empty = [(title, line) for title, line in empty if not ask(prometheus, "query", query=line)["result"]]
        assert time.monotonic() < deadline, empty
    groups = ask(prometheus, "rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert [rule["name"] for rule in rules] == [alert.name for alert in ALERTS]
    assert {rule["health"] for rule in rules} == {"ok"}, [rule.get("lastError") for rule in rules]


def test_a_server_that_lost_a_rank_is_told_and_was_not_before(balancing: ServerProcess, prometheus: str) -> None:
    """Last of those that ask the server: it ends."""
    (gone,) = (alert.expression for alert in ALERTS if alert.name == "MoeweGone")
    assert ask(prometheus, "query", query="moewe_info")["result"]
    assert not ask(prometheus, "query", query=gone)["result"]
    os.kill(balancing.children[-1].pid, signal.SIGKILL)
    assert balancing.exit_code(30) == 3
    deadline = time.monotonic() + 30
    while not (result := ask(prometheus, "query", query=gone)["result"]):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert [each["metric"]["instance"] for each in result] == [balancing.url.removeprefix("http://")]


def test_rules_are_files_that_other_tools_read(tmp_path: Path) -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool (of Debian's package prometheus) is not installed")
    rules = write_monitoring(tmp_path)[1]
    done = subprocess.run([tool, "check", "rules", str(rules)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and f"{len(ALERTS)} rules found" in done.stdout, done.stdout + done.stderr
