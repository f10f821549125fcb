"""docs/api.md: every field of every body, made from the tables that the server checks by. `make api` writes it.

Not used while serving. Units: Markdown.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..protocol.field_table import IGNORED, INSTEAD, as_json
from ..protocol.refused_paths import REFUSED
from .document import document, refused_on
from .field_origins import DIFFERENCES, known_to
from .words import limits_of, type_of

_START = """# The API, field by field

What each field of a request does here, and whether OpenAI's API and vLLM 0.32 have it. Made from the tables that the
server checks requests by (`make api`), as are `/openapi.json` and the page at `/docs` of a running server. Routes,
statuses and streams are in http-api.md.

- **supported**: does what it says. Null counts as left out. A value out of range is a 400 that names it.
- **ignored**: taken without effect, since it changes no output.
- **refused**: known elsewhere, not here. Values that ask for nothing are fine; any other is a 400.
- Any other field is a 400 that names the nearest one that we know; in a message such as `refusal` or `audio` only where
  it is not null or empty.
"""
_ROUTES = (
    ("/v1/completions", "CompletionRequest", False),
    ("/v1/chat/completions", "ChatRequest", True),
)
_OBJECTS = (
    ("A message", "ChatMessage"),
    ("`Tool`", "Tool"),
    ("`NamedTool`", "NamedTool"),
    ("`ToolCall`", "ToolCall"),
    ("`ResponseFormat`", "ResponseFormat"),
    ("`JsonSchemaFormat`", "JsonSchemaFormat"),
    ("`StructuredOutputs`", "StructuredOutputs"),
    ("`stream_options`", "StreamOptions"),
    ("`/tokenize` with a text", "TokenizeText"),
    ("`/tokenize` with messages", "TokenizeChat"),
    ("`/detokenize`", "Detokenize"),
)
_END = """## Answers of /tokenize and /detokenize

As vLLM's: `{"count", "max_model_len", "tokens", "token_strs"}` and `{"prompt"}`. `token_strs` holds texts rather than
the spelling inside the vocabulary. `/detokenize` shows special tokens.

## Routes that are refused

Each is a 404 with the code `unsupported_endpoint` and a message that says what to use.

"""


def reference() -> str:
    """Return the page."""
    schemas = document()["components"]["schemas"]
    parts = [_START]
    own = {
        path: {
            field: one
            for field, one in schemas[name]["properties"].items()
            if field not in IGNORED and field not in refused_on(chat)
        }
        for path, name, chat in _ROUTES
    }
    completions, chats = (own[path] for path, *_ in _ROUTES)
    both = [name for name, one in completions.items() if chats.get(name) == one]
    parts += ["## Supported on both routes\n", _supported(completions, both), ""]
    for path, fields in own.items():
        parts += [f"## Supported on {path}\n", _supported(fields, [name for name in fields if name not in both]), ""]
    parts += ["## Ignored on both routes\n", _rows(("field", "OpenAI", "vLLM"), (
        (f"`{field}`", *known_to(field)) for field in sorted(IGNORED)
    )), ""]  # fmt: skip
    heads = ("field", "values that are fine", "instead", "OpenAI", "vLLM")
    for path, _, chat in _ROUTES:
        rows = [
            (f"`{field}`", ", ".join(f"`{as_json(one)}`" for one in fine), INSTEAD.get(field, ""), *known_to(field))
            for field, fine in refused_on(chat).items()
        ]  # fmt: skip
        parts += [f"## Refused on {path}\n", _rows(heads, rows), ""]
    for title, name in _OBJECTS:
        parts += [f"## {title}\n", _rows(("field", "type", "limits", "what"), (
            (f"`{field}`", type_of(one), limits_of(one), one.get("description", ""))
            for field, one in schemas[name]["properties"].items()
        )), ""]  # fmt: skip
    parts.append(_END + _rows(("route", "what to do"), ((f"`{path}`", words) for path, words in REFUSED.items())))
    return "\n".join(parts) + "\n"


def _supported(fields: dict[str, dict[str, Any]], names: Iterable[str]) -> str:
    return _rows(("field", "type", "limits", "what", "OpenAI", "vLLM", "differences"), (
        (f"`{name}`", type_of(fields[name]), limits_of(fields[name]), fields[name].get("description", ""),
         *known_to(name), DIFFERENCES.get(name, ""))
        for name in names
    ))  # fmt: skip


def _rows(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join(line.replace("  ", " ") for line in lines)


if __name__ == "__main__":
    print(reference(), end="")
