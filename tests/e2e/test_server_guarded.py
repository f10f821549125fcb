"""A real server behind TLS, a key file and JSON logs: P-OPS-02, P-OPS-03, and only objects in its log."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from tests.support.chain import Chain, chain
from tests.support.server_process import NAME, ServerProcess

pytestmark = [pytest.mark.spawn, pytest.mark.slow]

KEY = "guarded-key-1"
ABORTS = "moewe_requests_finished_total|abort"
ALPHABET = ["ab", "cd", "ef", " the", " gull"]


class Guarded(ServerProcess):
    """A server process that is asked over TLS with a key."""

    def __init__(self, script: Chain, folder: Path) -> None:
        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1")
        issued.private_key_and_cert_chain_pem.write_to_path(str(folder / "server.pem"))
        (folder / "keys").write_text(f"# keys\n{KEY}\n")
        (folder / "keys").chmod(0o600)
        self.trust = ssl.create_default_context()
        authority.configure_trust(self.trust)
        self.http = httpx.Client(verify=self.trust, headers={"authorization": f"Bearer {KEY}"}, timeout=20)
        super().__init__(
            script.path, "--max-num-seqs", "8", "--kv-cache-memory-bytes", "64MiB", "--log-format", "json",
            "--ssl-certfile", str(folder / "server.pem"), "--api-key-file", str(folder / "keys"),
        )  # fmt: skip

    def get(self, path: str) -> httpx.Response:
        return self.http.get(self.url + path)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @url.setter
    def url(self, _: str) -> None:
        """The base class would speak plainly."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    script = chain(ALPHABET, loop=True)
    with Guarded(script, tmp_path_factory.mktemp("guarded")) as server:
        yield server


def ask(server: Guarded, request_id: str = "one", **more: Any) -> httpx.Response:
    body = {"model": NAME, "prompt": "x", "max_tokens": 3, "temperature": 0, **more}
    return server.http.post(f"{server.url}/v1/completions", json=body, headers={"x-request-id": request_id})


def hang_up(server: Guarded, count: int) -> None:
    """Open `count` long streams, wait until each has said something, and cut the connections."""
    body = json.dumps({"model": NAME, "prompt": "x", "max_tokens": 4000, "temperature": 0, "stream": True}).encode()
    fields = [
        "POST /v1/completions HTTP/1.1",
        "host: a",
        f"authorization: Bearer {KEY}",
        f"content-length: {len(body)}",
    ]
    head = "\r\n".join([*fields, "", ""])
    ready = threading.Barrier(count + 1, timeout=60)

    def stream() -> None:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as plain:
            with server.trust.wrap_socket(plain, server_hostname="127.0.0.1") as sock:
                sock.sendall(head.encode() + body)
                assert b"200 OK" in sock.recv(4096)
                ready.wait()

    threads = [threading.Thread(target=stream) for _ in range(count)]
    for thread in threads:
        thread.start()
    ready.wait()
    for thread in threads:
        thread.join()


def test_nobody_comes_in_without_the_key_or_plainly(server: Guarded) -> None:
    stranger = httpx.Client(verify=server.trust)
    assert stranger.get(f"{server.url}/v1/models").status_code == 401
    assert stranger.get(f"{server.url}/health").status_code == 200
    assert server.get("/v1/models").status_code == 200
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{server.port}/health")


def test_gauges_are_zero_within_three_seconds_of_a_mass_abort(server: Guarded) -> None:  # P-OPS-02
    before = server.counters()[ABORTS]
    hang_up(server, 20)
    server.wait_idle(within=3.0, aborts=before + 20)
    after = server.counters()
    assert after[ABORTS] - before == 20 and after["moewe_kv_usage_ratio"] == 0
    assert ask(server).status_code == 200


def test_each_end_is_counted_once_under_its_reason(server: Guarded) -> None:  # P-OPS-03
    before = server.counters()
    for _ in range(3):
        assert ask(server).json()["choices"][0]["finish_reason"] == "length"
    for _ in range(2):
        assert ask(server, max_tokens=60, stop=["gull"]).json()["choices"][0]["finish_reason"] == "stop"
    assert ask(server, max_tokens=10**6).status_code == 400
    hang_up(server, 5)
    server.wait_idle(within=3.0, aborts=before[ABORTS] + 5)
    after = server.counters()
    ends = {name: after[f"moewe_requests_finished_total|{name}"] - before[f"moewe_requests_finished_total|{name}"]
            for name in ("abort", "length", "stop", "error")}  # fmt: skip
    assert ends == {"abort": 5, "length": 3, "stop": 2, "error": 0}
    assert after["moewe_request_errors_total"] - before.get("moewe_request_errors_total", 0.0) == 1


def test_every_line_of_every_process_is_json_and_names_its_request(server: Guarded) -> None:
    """Last in the file: it ends the server by killing a rank, so that engine and ranks have something to say."""
    assert ask(server, request_id="find-me").headers["x-request-id"] == "find-me"
    rank = server.get("/v1/topology").json()["replicas"][0]["ranks"][1]["pid"]
    os.kill(rank, signal.SIGKILL)
    assert server.exit_code(20) == 3
    time.sleep(0.2)
    entries = [json.loads(line) for line in server.log().splitlines()]
    for entry in entries:
        assert {"time", "level", "logger", "process", "message"} <= set(entry)
    assert {"moewe", "engine"} <= {entry["process"] for entry in entries}
    about = [entry["message"] for entry in entries if entry.get("request_id") == "find-me"]
    assert len(about) == 1 and "POST /v1/completions 200" in about[0]
    text = " ".join(entry["message"] for entry in entries)
    assert "moewe serves gull" in text and f"https://127.0.0.1:{server.port}" in text and "engine lost" in text
    assert KEY not in server.log()
