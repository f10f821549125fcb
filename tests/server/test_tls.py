"""HTTPS by certificate files made here: who may connect, what is refused at start, and warnings of an open door."""

from __future__ import annotations

import logging
import socket
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from moewe.server.commands.serve import warn_of_open_door
from moewe.server.http.tls import tls_context
from moewe.server.options import ServerOptions
from tests.support.asking import fake
from tests.support.fake_replicas import make_state, with_server

ASKED = {"model": "gull", "prompt": "a", "max_tokens": 3, "stream": True}


class Authority:
    """A certificate authority and files of a server's certificate."""

    def __init__(self, folder: Path) -> None:
        self.ca = trustme.CA()
        issued = self.ca.issue_cert("127.0.0.1", "localhost")
        self.cert, self.key, self.both, self.ca_file = (
            str(folder / name) for name in ("cert.pem", "key.pem", "both.pem", "ca.pem")
        )
        Path(self.cert).write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(self.key)
        issued.private_key_and_cert_chain_pem.write_to_path(self.both)
        self.ca.cert_pem.write_to_path(self.ca_file)

    def client(self, *names: str) -> ssl.SSLContext:
        """Return what a client trusts, with a certificate for `names` if there are any."""
        context = ssl.create_default_context()
        self.ca.configure_trust(context)
        if names:
            self.ca.issue_cert(*names).configure_cert(context)
        return context


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


async def stream(client: httpx.AsyncClient) -> str:
    assert client.base_url.scheme == "https"
    return (await client.post("/v1/completions", json=ASKED)).text


@pytest.mark.parametrize("one_file", [False, True], ids=["two files", "one file"])
def test_streams_come_over_tls(authority: Authority, one_file: bool) -> None:
    files = (
        {"ssl_certfile": authority.both} if one_file else {"ssl_certfile": authority.cert, "ssl_keyfile": authority.key}
    )
    text = with_server(make_state(fake(), **files), stream, verify=authority.client())
    assert text.endswith("data: [DONE]\n\n")


def test_a_client_that_does_not_trust_or_speaks_plainly_gets_nothing(authority: Authority, tmp_path: Path) -> None:
    state = make_state(fake(), ssl_certfile=authority.both)
    with pytest.raises(httpx.ConnectError):
        with_server(state, stream, verify=ssl.create_default_context())

    async def plainly(client: httpx.AsyncClient) -> None:
        async with httpx.AsyncClient() as other:
            await other.get(f"http://127.0.0.1:{client.base_url.port}/health")

    with pytest.raises(httpx.TransportError):
        with_server(state, plainly, verify=authority.client())


def test_with_authorities_a_client_must_show_a_certificate(authority: Authority, tmp_path: Path) -> None:
    state = make_state(fake(), ssl_certfile=authority.both, ssl_ca_certs=authority.ca_file)
    assert "[DONE]" in with_server(state, stream, verify=authority.client("someone"))
    with pytest.raises(httpx.TransportError):
        with_server(state, stream, verify=authority.client())
    (tmp_path / "other").mkdir()
    stranger = authority.client()
    Authority(tmp_path / "other").ca.issue_cert("someone").configure_cert(stranger)
    with pytest.raises(httpx.TransportError):
        with_server(state, stream, verify=stranger)


def test_old_versions_of_tls_are_not_spoken(authority: Authority) -> None:
    context = tls_context(ServerOptions(ssl_certfile=authority.both))
    assert context is not None and context.minimum_version >= ssl.TLSVersion.TLSv1_2


def test_files_that_do_not_fit_are_refused_at_start(authority: Authority, tmp_path: Path) -> None:
    import subprocess

    other, locked, junk = tmp_path / "other.pem", tmp_path / "locked.pem", tmp_path / "junk.pem"
    trustme.CA().issue_cert("a").private_key_pem.write_to_path(str(other))
    junk.write_text("-----BEGIN CERTIFICATE-----\nnothing\n")
    command = ["openssl", "pkey", "-in", authority.key, "-aes256", "-passout", "pass:hush", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    cert = {"ssl_certfile": authority.cert}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"ssl_keyfile": authority.key}, "--ssl-keyfile does nothing without --ssl-certfile"),
        ({"ssl_ca_certs": authority.ca_file}, "--ssl-ca-certs does nothing"),
        ({"ssl_certfile": str(tmp_path / "none")}, "--ssl-certfile .* cannot be read"),
        (cert | {"ssl_keyfile": str(tmp_path)}, "--ssl-keyfile .* cannot be read"),
        (cert, "no certificate and its key"),
        (cert | {"ssl_keyfile": str(other)}, "no certificate and its key"),
        (cert | {"ssl_keyfile": str(locked)}, "without a password"),
        ({"ssl_certfile": str(junk)}, "no certificate and its key"),
        (cert | {"ssl_keyfile": authority.key, "ssl_ca_certs": str(junk)}, "--ssl-ca-certs .* holds no certificates"),
    ]
    for options, says in wrong:
        with pytest.raises(ValueError, match=says) as refusal:
            tls_context(ServerOptions(**options))
        assert "\n" not in str(refusal.value)
    assert tls_context(ServerOptions()) is None


@pytest.mark.parametrize(
    ("host", "options", "says"),
    [
        ("127.0.0.1", {}, None),
        ("0.0.0.0", {}, "no API key is asked"),
        ("0.0.0.0", {"api_keys": ("k",)}, "unencrypted"),
        ("0.0.0.0", {"api_keys": ("k",), "ssl_certfile": "c"}, None),
        ("0.0.0.0", {"ssl_certfile": "c"}, "no API key is asked"),
        ("0.0.0.0", {"ssl_certfile": "c", "ssl_ca_certs": "a"}, None),
    ],
)
def test_a_door_open_to_other_machines_is_warned_of(
    host: str, options: dict[str, Any], says: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server((host, 0)) as listener, caplog.at_level(logging.WARNING):
        warn_of_open_door(listener, ServerOptions(**options))
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [] if says is None else len(messages) == 1 and says in messages[0]
