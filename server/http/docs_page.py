"""The page at /docs: the OpenAPI document in general as plain HTML, and the document itself at /openapi.json.

Not the document (server/openapi/document.py). No script and nothing from elsewhere; the page holds no data of a server,
so it is open without a key, while the document names models and is not. Units: characters.
"""

from __future__ import annotations

from functools import cache
from html import escape
from typing import Any

from fastapi import FastAPI
from starlette.responses import JSONResponse, Response

from ..openapi.answers import Schema
from ..openapi.document import document
from ..openapi.words import limits_of, type_of
from ..state import ServerState
from .page import PAGE_HEADERS

DOCS_PATHS = frozenset({"/docs"})


def add_docs(app: FastAPI, state: ServerState) -> None:
    """Add the routes."""
    page = _page()

    @app.api_route("/docs", methods=["GET", "HEAD"], include_in_schema=False)
    async def docs() -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return JSONResponse(document(state))


@cache
def _page() -> str:
    return docs_page(document())


def docs_page(content: Schema) -> str:
    """Return the page of a document."""
    schemas = content["components"]["schemas"]
    routes = [
        _operation(path, method, operation, schemas)
        for path, item in content["paths"].items()
        for method, operation in item.items()
    ]
    objects = [_object(name, schema) for name, schema in schemas.items() if "properties" in schema]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>moewe API</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<link rel="icon" href="static/icon.svg" type="image/svg+xml"><link rel="stylesheet" href="static/docs.css">'
        f"</head><body><main><h1>moewe API {escape(content['info']['version'])}</h1>"
        '<p>OpenAI\'s routes, and a few of ours. For programs: <a href="openapi.json">openapi.json</a>. '
        "Unknown fields are refused by name.</p>"
        f"<h2>Routes</h2>{''.join(routes)}<h2>Objects</h2>{''.join(objects)}</main></body></html>\n"
    )


def _operation(path: str, method: str, operation: Schema, schemas: Schema) -> str:
    parts = [f"<section><h3><code>{method.upper()} {escape(path)}</code></h3><p>{escape(operation['summary'])}</p>"]
    body = operation.get("requestBody")
    if body is not None:
        parts.append(f"<p>Body: {_linked(body['content']['application/json']['schema'])}</p>")
    if parameters := operation.get("parameters"):
        parts.append(_table(("parameter", "type", "limits", ""), [
            (f"<code>{escape(one['name'])}</code>", escape(type_of(one["schema"])), escape(limits_of(one["schema"])),
             _text(one["description"]))
            for one in parameters
        ]))  # fmt: skip
    rows = [
        (f"<code>{status}</code>", " or ".join(_linked(kind["schema"]) for kind in response["content"].values()),
         _text(response["description"]))
        for status, response in operation["responses"].items()
    ]  # fmt: skip
    return "".join(parts) + _table(("status", "body", ""), rows) + "</section>"


def _object(name: str, schema: Schema) -> str:
    required = schema.get("required", ())
    rows = [
        (f"<code>{escape(field)}</code>{' *' if field in required else ''}", _linked(one), escape(limits_of(one)),
         _text(one.get("description", "")))
        for field, one in schema["properties"].items()
    ]  # fmt: skip
    heads = ("field (* required)", "type", "limits", "")
    return f'<section id="{escape(name)}"><h3>{escape(name)}</h3>{_table(heads, rows)}</section>'


def _linked(schema: Schema) -> str:
    if "$ref" in schema:
        name = escape(type_of(schema))
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_linked, schema["anyOf"])))
    if schema.get("type") == "array" and schema.get("items"):
        entry = _linked(schema["items"])
        return f"list of ({entry})" if " or " in entry else f"list of {entry}"
    return escape(type_of(schema))


def _text(words: str) -> str:
    """Words in backticks become code."""
    parts = escape(words).split("`")
    return "".join(f"<code>{part}</code>" if number % 2 else part for number, part in enumerate(parts))


def _table(heads: tuple[str, ...], rows: list[Any]) -> str:
    head = "".join(f"<th>{escape(word)}</th>" for word in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
