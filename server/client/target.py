"""Which server is asked and how: its URLs, headers and the key, which is shown nowhere.

Not the connection (server/bench/client.py). No units.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

COMPLETIONS, CHAT = "completions", "chat"
KEY_VARIABLES = ("MOEWE_API_KEY", "OPENAI_API_KEY")
_PATHS = {COMPLETIONS: "/completions", CHAT: "/chat/completions"}


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server.

    Attributes:
        root: without /v1, where /metrics and /version are.
        api: with /v1.
        url: of the endpoint.
        chat: the endpoint takes messages.
        headers: with the key; never part of a repr.
    """

    root: str
    api: str
    url: str
    chat: bool
    headers: Mapping[str, str] = field(repr=False)

    @property
    def local(self) -> bool:
        """True for this machine, which no proxy can reach for us."""
        host = urlsplit(self.root).hostname or ""
        return host in ("localhost", "::1") or host.startswith("127.")


def read_target(tool: Mapping[str, Any], environment: Mapping[str, str]) -> Target:
    """Return the server that flags and environment name.

    Raises:
        ValueError: names the flag; a key or the value of a header is never in the message.
    """
    base = tool.get("base_url", "http://127.0.0.1:8000")
    try:
        parts = urlsplit(base)
        host, port = parts.hostname, parts.port
    except ValueError:
        parts, host, port = urlsplit(""), None, None
    if parts.scheme not in ("http", "https") or not host or any(char.isspace() for char in base):
        raise ValueError("--base-url is no URL; write it like http://127.0.0.1:8000")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError("--base-url holds more than scheme, host, port and path; a key goes to --api-key")
    where = f"[{host}]" if ":" in host else host
    path = parts.path.rstrip("/").removesuffix("/v1")
    root = urlunsplit((parts.scheme, where if port is None else f"{where}:{port}", path, "", ""))
    endpoint = str(tool.get("endpoint", COMPLETIONS)).rstrip("/")
    if endpoint in _PATHS:
        url, chat = f"{root}/v1{_PATHS[endpoint]}", endpoint == CHAT
    elif endpoint.startswith("/") and endpoint.endswith(_PATHS[COMPLETIONS]):
        url, chat = root + endpoint, endpoint.endswith(_PATHS[CHAT])
    else:
        raise ValueError(f"--endpoint {endpoint!r} is not known; use completions, chat, or a path like /v1/completions")
    return Target(root=root, api=f"{root}/v1", url=url, chat=chat, headers=_headers(tool, environment))


def _headers(tool: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, str]:
    key = tool.get("api_key") or next((environment[name] for name in KEY_VARIABLES if environment.get(name)), None)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    for position, text in enumerate(tool.get("header", ()), 1):
        sign = next((char for char in text if char in "=:"), "")
        name, _, value = text.partition(sign) if sign else ("", "", "")
        if not name.strip() or not value.strip():
            raise ValueError(f"--header number {position} is not NAME=VALUE")
        headers[name.strip()] = value.strip()
    if any(ord(char) < 32 or ord(char) > 255 for pair in headers.items() for char in "".join(pair)):
        raise ValueError("--api-key or a --header holds a character that no header can carry")
    return headers


def read_extra_body(text: str | None) -> dict[str, Any]:
    """Return the fields that `--extra-body` adds to every request.

    Raises:
        ValueError: it is no JSON object.
    """
    try:
        body = json.loads(text) if text is not None else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--extra-body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ValueError("--extra-body must be a JSON object, such as '{\"top_p\": 0.9}'")
    for name in ("stream", "n", "best_of"):
        if name in body and body[name] not in (True if name == "stream" else 1,):
            raise ValueError(f"--extra-body may not set {name}; one stream a request is measured")
    return body
