"""Web pages of other origins: none may call unless asked, and those that may are answered as browsers expect."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from moewe.server.commands.serve import server_options
from tests.support.asking import fake
from tests.support.fake_replicas import make_state, with_server

PAGE = "https://chat.example:8443"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


def answers(options: dict[str, Any], *asked: tuple[str, str, dict[str, str]]) -> list[httpx.Response]:
    made = server_options(options)
    state = make_state(fake(), **{name: getattr(made, name) for name in options if name != "api_keys"}, api_keys=("k",))

    async def run(client: httpx.AsyncClient) -> list[httpx.Response]:
        return [await client.request(method, path, headers=headers) for method, path, headers in asked]

    done: list[httpx.Response] = with_server(state, run)
    return done


def access(response: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.startswith("access-control-")}


def test_without_the_option_no_origin_is_told_anything() -> None:
    key = {"authorization": "Bearer k", "origin": PAGE}
    preflight, asked = answers({}, ("OPTIONS", "/v1/models", PREFLIGHT), ("GET", "/v1/models", key))
    assert preflight.status_code == 401 and asked.status_code == 200
    assert access(preflight) == access(asked) == {}


def test_a_named_origin_may_ask_with_its_key_and_read_refusals() -> None:
    key = {"authorization": "Bearer k"}
    options = {"allowed_origins": (f'["{PAGE}", "http://localhost:3000"]',)}
    preflight, asked, refused, foreign, foreign_preflight = answers(
        options,
        ("OPTIONS", "/v1/chat/completions", PREFLIGHT),
        ("GET", "/v1/models", key | {"origin": PAGE}),
        ("GET", "/v1/models", {"origin": PAGE}),
        ("GET", "/v1/models", key | {"origin": "https://evil.example"}),
        ("OPTIONS", "/v1/models", PREFLIGHT | {"origin": "https://evil.example"}),
    )
    assert preflight.status_code == 200 and access(preflight)["access-control-allow-origin"] == PAGE
    assert "x-stainless-lang" in access(preflight)["access-control-allow-headers"]
    assert access(asked)["access-control-allow-origin"] == PAGE
    assert "x-request-id" in access(asked)["access-control-expose-headers"]
    assert refused.status_code == 401 and access(refused)["access-control-allow-origin"] == PAGE
    assert "access-control-allow-origin" not in access(foreign)
    assert foreign_preflight.status_code == 400
    assert "access-control-allow-credentials" not in access(asked)


def test_methods_headers_and_credentials_can_be_narrowed_or_allowed() -> None:
    options = {
        "allowed_origins": (PAGE,), "allow_credentials": True, "allowed_methods": ("POST",),
        "allowed_headers": ("authorization", "content-type"),
    }  # fmt: skip
    narrow = PREFLIGHT | {"access-control-request-headers": "authorization"}
    fine, method, header = answers(
        options,
        ("OPTIONS", "/v1/completions", narrow),
        ("OPTIONS", "/v1/completions", narrow | {"access-control-request-method": "DELETE"}),
        ("OPTIONS", "/v1/completions", PREFLIGHT),
    )
    assert (fine.status_code, method.status_code, header.status_code) == (200, 400, 400)
    assert access(fine)["access-control-allow-credentials"] == "true"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"allowed_origins": ("chat.example",)}, "is not an origin"),
        ({"allowed_origins": ("https://chat.example/",)}, "without a path"),
        ({"allowed_origins": ("https://*.example",)}, "is not an origin"),
        ({"allowed_origins": ("null",)}, "is not an origin"),
        ({"allowed_origins": ("[1]",)}, "not a JSON list"),
        ({"allowed_origins": ("[" * 9999,)}, "not a JSON list"),
        ({"allow_credentials": True}, "--allow-credentials does nothing without --allowed-origins"),
        ({"allowed_methods": ("GET",)}, "--allowed-methods does nothing"),
        ({"allowed_origins": ("*",), "allow_credentials": True}, "opens the API to every page"),
        ({"allowed_origins": (PAGE,), "allowed_headers": ("a b",)}, "no name"),
    ],
)
def test_options_that_mean_nothing_or_too_much_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        server_options(options)
