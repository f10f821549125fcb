"""From words on a command line or in a `--config` file to checked values, with their precedence.

Not the table of flags (server/flags/table.py). Command line wins over file wins over default; unknown keys are errors.
Units: bytes (`512MiB`, `4GB`, `1024`), seconds, tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...runtime.foreign import foreign
from ...runtime.options import nearest
from ...topologies.yaml_file import read_yaml_mapping
from .table import ENGINE, HTTP, SAMPLE, SHARED, TOOL, Flag

_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_UNITS |= {f"{letter}IB": _UNITS[letter] for letter in "KMGT"}
_UNITS |= {f"{letter}B": 1000 ** (power + 1) for power, letter in enumerate("KMGT")}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What was set for a command, apart by owner; what was not set is not in it.

    Attributes:
        engine, http, sample: by field name of the object that they fill.
        shared: by flag name.
        prompt: the text on the command line, where the command takes one.
        tool: what only this command has, by field name.
    """

    engine: dict[str, Any]
    http: dict[str, Any]
    sample: dict[str, Any]
    shared: dict[str, Any]
    prompt: str | None = None
    tool: dict[str, Any] = field(default_factory=dict)


def read_settings(flags: Sequence[Flag], given: Mapping[str, Any]) -> Settings:
    """Return the settings of one command.

    Args:
        flags: those that it knows.
        given: by parameter name, what stands on the command line; None means not given.
    """
    words = dict(given)
    model = words.pop("model_argument", None)
    if model is not None and words.get("model") not in (None, model):
        raise ValueError(f"the model is given twice, as {model!r} and --model {words['model']!r}; leave one out")
    words["model"] = model or words.get("model")
    config = words.get("config")
    values = merged(flags, words, Path(config) if config else None)
    if "model" not in values and any(flag.name == "model" and flag.group == ENGINE for flag in flags):
        raise ValueError("no MODEL is given; name a folder, a hub id, or the word demo")
    owners: dict[str, dict[str, Any]] = {ENGINE: {}, HTTP: {}, SAMPLE: {}, SHARED: {}, TOOL: {}}
    for flag in flags:
        if flag.name in values:
            owners[flag.group][flag.name if flag.group == SHARED else flag.target] = values[flag.name]
    return Settings(
        engine=owners[ENGINE],
        http=owners[HTTP],
        sample=owners[SAMPLE],
        shared=owners[SHARED],
        prompt=words.get("prompt_argument"),
        tool=owners[TOOL],
    )


def parse_bytes(text: str) -> int:
    """Return the number of bytes that `text` says; K, M, G, T count in 1024s, KB, MB, GB, TB in 1000s.

    Example:
        >>> parse_bytes("512MiB"), parse_bytes("1.5 GB")
        (536870912, 1500000000)
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a size; use bytes, or a unit as in 512MiB or 4GB")
    return (
        int(float(match[1]) * _UNITS[match[2].upper()]) if "." in match[1] else int(match[1]) * _UNITS[match[2].upper()]
    )


def merged(flags: Iterable[Flag], given: Mapping[str, Any], config: Path | None) -> dict[str, Any]:
    """Return the values that were set, by flag name.

    Args:
        flags: those that the command knows.
        given: by parameter name, what stands on the command line; None means not given.
        config: file of further flags.
    """
    known = {flag.name: flag for flag in flags}
    values = read_config(config, known) if config is not None else {}
    for name, flag in known.items():
        raw = given.get(flag.parameter)
        if raw is not None and raw != []:
            values[name] = convert(flag, raw, where=f"--{name}")
    return values


def read_config(path: Path, known: Mapping[str, Flag]) -> dict[str, Any]:
    """Return the values in a YAML file whose keys are long flag names (aliases and underscores are fine)."""
    spellings = {spelling: flag for flag in known.values() for spelling in _spellings(flag)}
    values: dict[str, Any] = {}
    for key, raw in read_yaml_mapping(path).items():
        flag = spellings.get(key.removeprefix("--").replace("_", "-"))
        if flag is None:
            near = nearest(key, spellings, otherwise="moewe serve --help lists all")
            raise ValueError(foreign(key) or f"{key!r} in {str(path)!r} is not a flag; {near}")
        if flag.name == "config":
            raise ValueError(f"{key!r} in {str(path)!r} names a further file, which is not read; put its flags here")
        if flag.name in values:
            raise ValueError(f"{key!r} in {str(path)!r} sets {flag.name} a second time; leave one out")
        if raw is not None:
            values[flag.name] = convert(flag, raw, where=f"{key} in {str(path)!r}")
    return values


def convert(flag: Flag, raw: Any, *, where: str) -> Any:
    """Return `raw` as the kind of value that `flag` takes.

    Raises:
        ValueError: it is of another kind; the message begins with `where`.
    """
    value, wanted = raw, ""
    if flag.kind in ("bool", "switch"):
        value, wanted = (raw, "") if isinstance(raw, bool) else (None, "true or false")
    elif flag.kind == "list":
        items = raw if isinstance(raw, list) else [raw]
        value, wanted = tuple(items), "" if all(isinstance(item, str) and item for item in items) else "text"
    elif flag.kind == "ints":
        items = raw if isinstance(raw, list) else str(raw).split(",")
        numbers = [_as_number(item, int, "whole numbers, such as 1,2,4,8") for item in items]
        value, wanted = tuple(number for number, _ in numbers), next((words for _, words in numbers if words), "")
    elif isinstance(raw, (bool, list, dict)):
        wanted = "one value"
    elif flag.kind == "int":
        value, wanted = _as_number(raw, int, "a whole number")
    elif flag.kind == "float":
        value, wanted = _as_number(raw, float, "a number")
    elif flag.kind == "bytes":
        try:
            return parse_bytes(str(raw))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    else:
        value, wanted = str(raw), "" if str(raw) else "some text"
    if wanted:
        raise ValueError(f"{where}: {raw!r} is not allowed; use {wanted}")
    return value


def _as_number(raw: Any, kind: type[int] | type[float], wanted: str) -> tuple[int | float | None, str]:
    if kind is int and isinstance(raw, float):
        return None, wanted
    try:
        return kind(raw), ""
    except (TypeError, ValueError):
        return None, wanted


def _spellings(flag: Flag) -> list[str]:
    return [flag.name, *(alias.removeprefix("--") for alias in flag.aliases)]
