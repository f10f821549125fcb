"""JSON files that we do not trust, read with limits, and their fields, read with types and ranges.

Not a schema language and not about models: `families` and `checkpoint` say which fields they want.
Every refusal is a ConfigError of one line with file, field, value and fix; sizes are in bytes.
"""

from __future__ import annotations

import json
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from .config import ConfigError

_T = TypeVar("_T")
_MISSING: Any = object()
_WORD = re.compile(r"\w{1,80}", re.ASCII)


def show(value: object, limit: int = 80) -> str:
    """Return `value` as it may stand in a one-line message: escaped and cut to `limit` characters."""
    text = ascii(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def show_name(name: str) -> str:
    """Return the name of a field as it may stand in a one-line message: as it is where it is one plain word."""
    return name if _WORD.fullmatch(name) else show(name)


def show_path(path: Path) -> str:
    """Return `path` as it may stand in a one-line message: escaped, and long enough that its end is still there."""
    return show(str(path), limit=4096)


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """Return the JSON object in `data`; `what` names it in a refusal."""
    try:
        content = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_unique_object)
    except RecursionError:
        raise ConfigError(f"{what} is nested too deeply to be a real file; download it again") from None
    except ValueError as error:
        reason = show(str(error))
        raise ConfigError(f"{what} is not valid JSON ({reason}); it may be an incomplete download") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{what} holds {show(content)} where a JSON object is expected; download it again")
    return content


def read_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object in the file `path`, which may not be larger than `max_bytes`."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{show_path(path)} is not a regular file; give a model folder as transformers saves it")
        if status.st_size > max_bytes:
            raise ConfigError(f"{show_path(path)} has {status.st_size} bytes, more than the {max_bytes} allowed")
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {show_path(path)}: {error.strerror}; check the path and its rights") from None
    return parse_object(data, path.name)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return content


@dataclass(frozen=True)
class Fields:
    """Typed, range-checked access to one JSON object.

    A `name` may list several spellings separated by `|`; those that are present and not null must agree.

    Attributes:
        content: the object.
        where: its file and place, for messages.
        defaults: values of fields that may be absent (by first spelling).
        read: names that somebody asked for.
    """

    content: dict[str, Any]
    where: str
    defaults: dict[str, Any]
    read: set[str] = field(default_factory=set, compare=False)

    def raw(self, name: str) -> Any:
        """Return the value of a field, or its default, or None when it is absent or null."""
        spellings = name.split("|")
        self.read.update(spellings)
        given = [s for s in spellings if self.content.get(s) is not None]
        if not given:
            return self.defaults.get(spellings[0])
        value = self.content[given[0]]
        for other in given[1:]:
            if self.content[other] != value:
                raise self.refuse(given[0], value, f"contradicts {other} = {show(self.content[other])}; keep one")
        return value

    def stated(self, name: str) -> Any:
        """Return the value of a field, None when it is null, or its default when it is absent."""
        self.read.add(name)
        return self.content[name] if name in self.content else self.defaults.get(name)

    def integer(self, name: str, low: int, high: int, default: int = _MISSING) -> int:
        """Return an integer between `low` and `high`, both allowed."""
        value = self._value(name, default)
        if type(value) is not int:
            raise self.refuse(name, value, f"must be an integer from {low} to {high}")
        if not low <= value <= high:
            raise self.refuse(name, value, f"is out of range: use an integer from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float, default: float = _MISSING, *, closed: bool = False) -> float:
        """Return a finite number greater than `low` (or also equal to it, where `closed`) and at most `high`."""
        value = self._value(name, default)
        if type(value) not in (int, float) or not (low < value <= high or (closed and value == low)):
            least = f"from {low:g}" if closed else f"above {low:g}"
            raise self.refuse(name, value, f"must be a number {least} and at most {high:g}")
        return float(value)

    def flag(self, name: str, default: bool = _MISSING) -> bool:
        """Return true or false."""
        value = self._value(name, default)
        if type(value) is not bool:
            raise self.refuse(name, value, "must be true or false")
        return value

    def integers(self, name: str, low: int, high: int, max_length: int) -> tuple[int, ...]:
        """Return the integers of a list (or of a single integer; none when absent), each between `low` and `high`."""
        value: Any = self._value(name, [])
        items = value if isinstance(value, list) else [value]
        if len(items) > max_length:
            raise self.refuse(name, value, f"may list at most {max_length} integers")
        if any(type(item) is not int or not low <= item <= high for item in items):
            raise self.refuse(name, value, f"must hold integers from {low} to {high}")
        return tuple(items)

    def repeated_integer(self, name: str, low: int, high: int) -> int:
        """Return an integer, which may also be said once a layer in a list of equal ones."""
        value: Any = self._value(name, _MISSING)
        if not isinstance(value, list):
            return self.integer(name, low, high)
        if not value or any(item != value[0] for item in value):
            raise self.refuse(name, value, "differs between layers, which this version does not do; use another model")
        return Fields(content={name.split("|")[0]: value[0]}, where=self.where, defaults={}).integer(name, low, high)

    def numbers(self, name: str, low: float, high: float, length: int) -> tuple[float, ...]:
        """Return the `length` numbers of a list, each greater than `low` and at most `high`."""
        value: Any = self._value(name, _MISSING)
        if not isinstance(value, list) or len(value) != length:
            raise self.refuse(name, value, f"must be a list of {length} numbers")
        if any(type(item) not in (int, float) or not low < item <= high for item in value):
            raise self.refuse(name, value, f"must hold numbers above {low:g} and at most {high:g}")
        return tuple(map(float, value))

    def section(self, name: str) -> Fields:
        """Return the fields of a nested object, empty when it is absent."""
        value: Any = self._value(name, {})
        if not isinstance(value, dict):
            raise self.refuse(name, value, "must be an object")
        return Fields(content=value, where=f"{self.where}: {name.split('|')[0]}", defaults={})

    def refuse(self, name: str, value: object, why: str) -> ConfigError:
        """Return the error that says `why` the value of a field cannot be."""
        spelling = next((s for s in name.split("|") if s in self.content), name.split("|")[0])
        return ConfigError(f"{self.where}: {show_name(spelling)} = {show(value)} {why}")

    def _value(self, name: str, default: _T) -> Any | _T:
        value = self.raw(name)
        if value is not None:
            return value
        if default is _MISSING:
            spelling = " (or ".join(name.split("|")) + ")" * name.count("|")
            raise ConfigError(f"{self.where}: {spelling} is missing; add it or download the file again")
        return default
