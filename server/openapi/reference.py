"""docs/api.md: every field of every body, made from the tables that the server checks by. `make api` writes it.

Not used while serving. Units: Markdown.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..protocol.field_table import IGNORED, INSTEAD, as_json
from ..protocol.refused_paths import REFUSED
from .answers import Schema
from .document import document, refused_on
from .field_origins import INNER_DIFFERENCES, difference_of, inner_known_to, known_to
from .words import limits_of, type_of

_START = """# The API, field by field

What each field of a request does here, and whether OpenAI's API and vLLM 0.32 have it. Made from the tables that the
server checks requests by (`make api`), as are `/openapi.json` and the page at `/docs` of a running server. Routes,
statuses and streams are in http-api.md.

- **supported**: does what it says. Null counts as left out. A value out of range is a 400 that names it.
- **ignored**: taken without effect, since it changes no output.
- **refused**: known elsewhere, not here. Values that ask for nothing are fine; any other is a 400.
- `*` behind a name: must be sent.
- Any other field is a 400 that names the nearest one that we know; in a message such as `refusal` or `audio` only where
  it is not null or empty. Of a tool, its function, or a call of an earlier turn, further fields reach the template as
  sent; of a part of a `content` they are taken without effect.
"""
_ROUTES = (
    ("/v1/completions", "CompletionRequest", False),
    ("/v1/chat/completions", "ChatRequest", True),
)
# What it is, and the name of its schema. Every object that a body may hold has one.
_OBJECTS = (
    ("`ChatMessage`, an entry of `messages`", "ChatMessage"),
    ("`ContentPart`, an entry of a message's `content`", "ContentPart"),
    ("`ToolCall`, an entry of a message's `tool_calls`", "ToolCall"),
    ("`CalledFunction`, the `function` of a `ToolCall`", "CalledFunction"),
    ("`Tool`, an entry of `tools`", "Tool"),
    ("`Function`, the `function` of a `Tool`", "Function"),
    ("`NamedTool`, a `tool_choice`", "NamedTool"),
    ("`NamedFunction`, the `function` of a `NamedTool`", "NamedFunction"),
    ("`StreamOptions`, the `stream_options`", "StreamOptions"),
    ("`ResponseFormat`, the `response_format`", "ResponseFormat"),
    ("`JsonSchemaFormat`, the `json_schema` of a `ResponseFormat`", "JsonSchemaFormat"),
    ("`StructuredOutputs`, the `structured_outputs`", "StructuredOutputs"),
    ("`/tokenize` with a text", "TokenizeText"),
    ("`/tokenize` with messages", "TokenizeChat"),
    ("`/detokenize`", "Detokenize"),
)
_LOGPROBS = """## Log-probabilities of a chat

With `logprobs` each choice has `logprobs: {"content": [...], "refusal": null}`; in a stream each chunk has that of its
own tokens. An entry is `{"token", "logprob", "bytes", "top_logprobs"}`, where `top_logprobs` is a list of
`{"token", "logprob", "bytes"}` from the likeliest down, as many as the request's `top_logprobs` (none without it).

- There is an entry for every token that `usage.completion_tokens` counts: of marks, reasoning and calls too, and of a
  stop string that the text leaves out. So the tokens need not join to `content`.
- The numbers are natural logarithms of what the model gives, before temperature, penalties, `logit_bias` and grammars;
  -9999.0 stands for minus infinity.
- `bytes` are the token's own. Where they are only a part of a character, `token` shows a replacement: join `bytes`.
- With `return_tokens_as_token_ids`, `token` is `token_id:ID`.

"""
_END = """## Answers of /tokenize and /detokenize

As vLLM's: `{"count", "max_model_len", "tokens", "token_strs"}` and `{"prompt"}`. `token_strs` holds texts rather than
the spelling inside the vocabulary. `/detokenize` shows special tokens.

## Routes that are refused

Each is a 404 with the code `unsupported_endpoint` and a message that says what to use.

"""


def reference() -> str:
    """Return the page."""
    content = document()
    schemas = content["components"]["schemas"]
    parts = [_START, *_supported_on_routes(schemas)]
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
        parts += [f"## {title}\n", _inner(name, schemas[name]), ""]
    parts += ["## Parameters in the URL\n", _parameters(content["paths"]), "", _LOGPROBS + _END]
    refused = _rows(("route", "what to do"), ((f"`{path}`", words) for path, words in REFUSED.items()))
    return "\n".join(parts) + refused + "\n"


def _supported_on_routes(schemas: Schema) -> list[str]:
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
    parts = ["## Supported on both routes\n", _supported(schemas["CompletionRequest"], both, chat=False), ""]
    for path, schema, chat in _ROUTES:
        names = [name for name in own[path] if name not in both]
        parts += [f"## Supported on {path}\n", _supported(schemas[schema], names, chat=chat), ""]
    return parts


def _supported(schema: Schema, names: Iterable[str], *, chat: bool) -> str:
    return _rows(("field", "type", "limits", "what", "OpenAI", "vLLM", "differences"), (
        (*_said(name, schema), *known_to(name), difference_of(name, chat=chat)) for name in names
    ))  # fmt: skip


def _inner(name: str, schema: Schema) -> str:
    return _rows(("field", "type", "limits", "what", "OpenAI", "vLLM", "differences"), (
        (*_said(field, schema), *inner_known_to(name, field), INNER_DIFFERENCES.get((name, field), ""))
        for field in schema["properties"]
    ))  # fmt: skip


def _said(field: str, schema: Schema) -> tuple[str, str, str, str]:
    """What is said of a field of an object, in the first four cells of a row."""
    one = schema["properties"][field]
    return _named(field, field in schema.get("required", ())), type_of(one), limits_of(one), one.get("description", "")


def _parameters(paths: Schema) -> str:
    return _rows(("route", "parameter", "type", "limits", "what"), (
        (f"`{method.upper()} {path}`", _named(one["name"], one.get("required", False)), type_of(one["schema"]),
         limits_of(one["schema"]), one["description"])
        for path, item in paths.items()
        for method, operation in item.items()
        for one in operation.get("parameters", ())
    ))  # fmt: skip


def _named(name: str, required: bool) -> str:
    return f"`{name}` *" if required else f"`{name}`"


def _rows(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join(line.replace("  ", " ") for line in lines)


if __name__ == "__main__":
    print(reference(), end="")
