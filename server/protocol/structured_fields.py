"""The fields that ask for structured output: OpenAI's `response_format`, vLLM's `guided_*` and `structured_outputs`.

Not the check of grammars (server/intake/structured.py). Exactly one of the fields may ask for something.
Units: grammars as text, see `StructuredSpec`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...runtime.params import StructuredSpec
from ...text.grammar import GRAMMAR_KINDS
from ..errors import invalid
from .field_table import check_inner

FIELDS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
FORMATS = ("text", "json_object", "json_schema")
# Options of other servers' engines. The values listed ask for nothing.
OPTIONS = {
    "disable_fallback": (None, False),
    "disable_any_whitespace": (None, False),
    "disable_additional_properties": (None, False),
    "whitespace_pattern": (None,),
    "structural_tag": (None,),
}


@dataclass(frozen=True, kw_only=True)
class AskedStructure:
    """What a request asks its text to look like.

    Attributes:
        field: path of the field that asks, for errors.
        spec: what it asks.
    """

    field: str
    spec: StructuredSpec


def asked_structure(**fields: Any) -> AskedStructure | None:
    """Return what the fields of a request ask, None when they leave the text free.

    Args:
        fields: one for each name of FIELDS, as sent.

    Raises:
        ApiError: a field is malformed, or several ask for something.
    """
    asked = [found for name in FIELDS for found in _asked(name, fields.get(name))]
    if len(asked) > 1:
        names = " and ".join(found.field for found in asked)
        raise invalid(f"{names} exclude each other; send one of them", asked[1].field)
    return asked[0] if asked else None


def _asked(name: str, value: Any) -> Iterator[AskedStructure]:
    if value is None:
        return
    if name == "response_format":
        yield from _of_format(value)
    elif name == "structured_outputs":
        yield from _of_options(value)
    else:
        yield _structure(name, name.removeprefix("guided_"), value)


def _of_format(value: Any) -> Iterator[AskedStructure]:
    if not isinstance(value, dict) or value.get("type") not in FORMATS:
        raise invalid(f"response_format must be an object whose type is one of {', '.join(FORMATS)}", "response_format")
    kind = value["type"]
    check_inner(value, ("type", "json_schema") if kind == "json_schema" else ("type",), "response_format.")
    if kind == "json_object":
        yield _structure("response_format", "json_object", True)
    if kind != "json_schema":
        return
    path, part = "response_format.json_schema", value.get("json_schema")
    if not isinstance(part, dict):
        raise invalid(f"{path} must be an object with a name and a schema", path)
    check_inner(part, ("name", "description", "schema", "strict"), f"{path}.")
    if not isinstance(part.get("name", ""), str):
        raise invalid(f"{path}.name must be a text", f"{path}.name")
    if part.get("strict") not in (None, True, False):
        raise invalid(
            f"{path}.strict must be true or false; the answer keeps to the schema either way", f"{path}.strict"
        )
    if part.get("schema") is None:
        raise invalid(f"{path}.schema is missing; send a JSON schema", f"{path}.schema")
    yield _structure(f"{path}.schema", "json", part["schema"])


def _of_options(value: Any) -> Iterator[AskedStructure]:
    path = "structured_outputs"
    if not isinstance(value, dict):
        raise invalid(f"{path} must be an object with one of {', '.join(GRAMMAR_KINDS)}", path)
    check_inner(value, (*GRAMMAR_KINDS, *OPTIONS), f"{path}.")
    for name, fine in OPTIONS.items():
        if value.get(name) not in fine:
            raise invalid(f"{path}.{name} is not supported; leave it out", f"{path}.{name}")
    given = [name for name in GRAMMAR_KINDS if value.get(name) is not None and value[name] is not False]
    if not given:
        raise invalid(f"{path} asks for nothing; set one of {', '.join(GRAMMAR_KINDS)}", path)
    for name in given:
        yield _structure(f"{path}.{name}", name, value[name])


def _structure(field: str, kind: str, value: Any) -> AskedStructure:
    """Return what one field asks, with its value in the form of `StructuredSpec.text`."""
    if kind == "json_object":
        if value is not True:
            raise invalid(f"{field} must be true or false", field)
        text = ""
    elif kind == "json":
        if not isinstance(value, (str, dict, bool)):
            raise invalid(f"{field} must be a JSON schema (an object, or its text), got {type(value).__name__}", field)
        text = value if isinstance(value, str) else json.dumps(value)
    elif kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(entry, str) and entry for entry in value):
            raise invalid(f"{field} must be a list of texts, none of them empty", field)
        text = json.dumps(value)
    elif isinstance(value, str):
        text = value
    else:
        raise invalid(f"{field} must be a text, got {type(value).__name__}", field)
    return AskedStructure(field=field, spec=StructuredSpec(kind=kind, text=text))
