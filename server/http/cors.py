"""Web pages of other origins (CORS): none may call the API unless an option names them.

Not authentication: a page still needs a key. A preflight is answered without one: browsers send none.
Units: origins such as `https://chat.example:8443`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from ..options import ServerOptions

ALL = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_LISTS = ("allowed_origins", "allowed_methods", "allowed_headers")
# What a page may read of an answer beside its body.
_EXPOSED = ("x-request-id", "retry-after")


def with_origins(app: ASGIApp, options: ServerOptions) -> ASGIApp:
    """Return `app` with answers to other origins, or as it is where none may call."""
    if not options.allowed_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=options.allowed_origins,
        allow_credentials=options.allow_credentials,
        allow_methods=options.allowed_methods or (ALL,),
        allow_headers=options.allowed_headers or (ALL,),
        expose_headers=_EXPOSED,
    )


def checked_origins(values: dict[str, Any]) -> dict[str, Any]:
    """Return these options of the server with JSON lists taken apart.

    Raises:
        ValueError: what is no origin, no method or no header, or options that do nothing or too much.
    """
    lists: dict[str, Any] = {name: _items(name, values[name]) for name in _LISTS if name in values}
    for origin in lists.get("allowed_origins", ()):
        if origin != ALL and _ORIGIN.fullmatch(origin) is None:
            raise ValueError(
                f"--allowed-origins: {origin!r} is not an origin; use https://host, with a port where it has one and "
                "without a path, in lower case, or *"
            )
    for name in ("allowed_methods", "allowed_headers"):
        for word in lists.get(name, ()):
            if _TOKEN.fullmatch(word) is None:
                raise ValueError(f"--{name.replace('_', '-')}: {word!r} is no name; repeat the flag for several")
    if not lists.get("allowed_origins"):
        for name in ("allow_credentials", "allowed_methods", "allowed_headers"):
            if values.get(name):
                raise ValueError(f"--{name.replace('_', '-')} does nothing without --allowed-origins; name the origins")
    if values.get("allow_credentials") and ALL in lists.get("allowed_origins", ()):
        raise ValueError("--allow-credentials with --allowed-origins * opens the API to every page; name the origins")
    return {**values, **lists}


def _items(name: str, given: Sequence[str]) -> tuple[str, ...]:
    """Each value is one item, or as other servers write it, a JSON list of them."""
    items: list[str] = []
    for word in given:
        if not word.lstrip().startswith("["):
            items.append(word)
            continue
        try:
            made = json.loads(word)
        except (ValueError, RecursionError):
            made = None
        if not isinstance(made, list) or not all(isinstance(item, str) for item in made):
            raise ValueError(f"--{name.replace('_', '-')}: {word!r} is not a JSON list of texts")
        items += made
    return tuple(items)
