"""Flat option names (`max_model_len=4096`) to a nested `EngineConfig`, names and kinds checked.

Not parsing of a command line (server/flags/values.py) and not the table of ranges (runtime/ranges.py).
Units: as in runtime/config.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ..topologies import AUTO, load_layout
from .auto_topology import domains_of
from .config import CacheOptions, EngineConfig, GraphOptions, ModelOptions, ParallelOptions, ScheduleOptions
from .foreign import foreign
from .ranges import check_ranges

_SECTIONS: dict[str, type[msgspec.Struct]] = {
    "model": ModelOptions,
    "parallel": ParallelOptions,
    "cache": CacheOptions,
    "schedule": ScheduleOptions,
    "graphs": GraphOptions,
}
# What resolving fills in; nobody sets it.
_DERIVED = ("eplb_load", "eplb_slots", "graph_rows", "graph_bytes")
# Names are unique over all sections.
_FIELDS: dict[str, str] = {
    field.name: section
    for section, struct in _SECTIONS.items()
    for field in msgspec.structs.fields(struct)
    if field.name not in _DERIVED
}


def option_names() -> tuple[str, ...]:
    """Return the names of all engine options."""
    return tuple(_FIELDS)


def engine_config(options: Mapping[str, Any]) -> EngineConfig:
    """Return the config that flat `options` describe; `path` may be left out until the model is found.

    Raises:
        ValueError: an unknown name (the nearest known one is named) or a value of the wrong kind.

    Example:
        >>> engine_config({"model": "demo", "topology": "EP2DP1"}).parallel.topology
        'EP2DP1'
    """
    sections: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    for name, value in ({"path": ""} | dict(options)).items():
        if name not in _FIELDS:
            raise ValueError(foreign(name) or f"option {name!r} is not known; {nearest(name, _FIELDS)}")
        sections[_FIELDS[name]][name] = value
    made = {section: _convert(_SECTIONS[section], values) for section, values in sections.items()}
    return EngineConfig(**made)


def layout_config(options: Mapping[str, Any], *, dialect: str | None = None) -> EngineConfig:
    """Return the config of flat `options` whose `topology` may be any layout: text, a YAML file, a preset, or `auto`.

    Args:
        options: see `engine_config`.
        dialect: how the topology counts DP, see `topologies.parse_topology`.

    Raises:
        ValueError: as `engine_config`, for a layout that this version does not run, and for a value out of range.
    """
    text = options.get("topology", ParallelOptions().topology)
    if not isinstance(text, str):
        raise ValueError(f"topology={text!r} is not allowed; use text of the form EPxDPy, for example 'EP2DP1'")
    # `auto` stays until the model and the machine are known (runtime/resolve.py).
    topology = AUTO if text.strip().lower() == AUTO else load_layout(text, dialect=dialect).single().long()
    config = engine_config({**options, "topology": topology})
    check_ranges(config)
    if config.parallel.domains is not None:
        domains_of(config.parallel.domains)
    if config.model.chat_template is not None:
        from ..text import check_template_option  # most starts need no Jinja yet

        check_template_option(config.model.chat_template)
    return config


def _convert(struct: type[msgspec.Struct], values: dict[str, Any]) -> Any:
    made = dict(values)
    for field in msgspec.structs.fields(struct):
        if field.name in values:
            try:
                made[field.name] = msgspec.convert(values[field.name], field.type)
            except msgspec.ValidationError as error:
                kind = str(error).replace("`", "").replace("null", "None")
                raise ValueError(f"{field.name}={values[field.name]!r} is not allowed: {kind}") from None
    return struct(**made)


def nearest(name: str, known: Iterable[str], *, otherwise: str = "") -> str:
    """Return `did you mean ...?`, or when nothing is near `otherwise`, by default the list of what is known."""
    plain = {key.removeprefix("--").replace("_", "-"): key for key in known}
    close = difflib.get_close_matches(name.removeprefix("--").replace("_", "-"), list(plain), n=1)
    if close:
        return f"did you mean {plain[close[0]]}?"
    return otherwise or f"known are {', '.join(sorted(plain.values()))}"
