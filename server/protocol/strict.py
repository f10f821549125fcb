"""What all bodies have in common: types taken literally, a description of each field, mistakes told in one line.

Not the fields (server/protocol/requests.py, server/protocol/token_bodies.py). What is said of a field here is what the
OpenAPI document and docs/api.md say of it. Units: JSON bytes in.
"""

from __future__ import annotations

import codecs
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from ..errors import ApiError, invalid
from .field_table import as_json

_BYTE_ORDER_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_EXACT = 2.0**53  # up to here a float is the number that was written


def whole(value: Any) -> Any:
    """Return 16.0 as the integer that it is to JSON schema and to clients that have only one kind of number."""
    return int(value) if type(value) is float and value.is_integer() and abs(value) <= _EXACT else value


def whole_numbers(values: list[Any]) -> list[Any]:
    """Return a list with `whole` of each entry; the list itself where there is nothing to do."""
    return [whole(value) for value in values] if float in set(map(type, values)) else values


def _short(value: Any) -> Any:
    """Refuse an integer of thousands of digits here: a message that refuses it later would be as long."""
    if type(value) is int and value.bit_length() > 128:
        raise PydanticCustomError("int_too_large", "Input should be an integer of at most 64 bits")
    return whole(value)


Integer: TypeAlias = Annotated[int, BeforeValidator(_short)]


class Strict(BaseModel):
    """A JSON object whose types are taken literally; unknown fields are kept, to be refused by name."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class Body(Strict):
    """A whole body, which can check itself further."""

    def check(self) -> None:
        """Refuse what cannot be honoured."""
        raise NotImplementedError  # every kind of body says what that is


def described(
    text: str, default: Any = None, *, types: list[str] | None = None, most: int | None = None, **schema: Any
) -> Any:
    """Return a field with what is said of it.

    Args:
        text: one sentence without a stop.
        default: of the field; `...` demands it.
        types: JSON types, where the annotation is Any.
        most: entries that a list or an object may have; reading ends there, however many more come.
        schema: further JSON schema, such as `minimum`; it describes what is checked elsewhere.
    """
    extra = {**schema, **({"type": types} if types else {})}
    return Field(default=default, description=text, max_length=most, json_schema_extra=extra or None)


Parsed = TypeVar("Parsed", bound=Body)


def parse(body: type[Parsed], data: bytes) -> Parsed:
    """Return the checked request, or raise ApiError that names the field."""
    try:
        request = body.model_validate_json(data)
    except ValidationError as error:
        raise _readable(error, data) from None
    request.check()
    return request


def _readable(error: ValidationError, data: bytes) -> ApiError:
    """The first mistake in one line."""
    first = error.errors(include_url=False)[0]
    message = str(first["msg"])
    if first["type"] == "json_invalid":
        if not data.strip():
            return invalid("the request body is empty; send a JSON object")
        if data.startswith(_BYTE_ORDER_MARKS):
            return invalid("the request body begins with a byte order mark; send JSON as UTF-8 without one")
        hint = "; it may hold a lone surrogate, which is no Unicode text" if "hex escape" in message else ""
        return invalid(f"request body: {message}{hint}")
    if not first["loc"]:
        return invalid("request body must be a JSON object")
    path = ".".join(str(part) for part in first["loc"] if part not in ("str", "list[str]"))
    if first["type"] == "too_long":
        return invalid(f"{path} has more than {first['ctx']['max_length']} entries; send fewer", path)
    got = "" if first["type"] == "missing" else f", got {as_json(first['input'])}"
    return invalid(f"{path}: {message}{got}", path)
