"""A layout: one pool of ranks, or several named pools and the classes of requests that go through them.

Not a router: it says which pools exist and who may use them. Parsed from text, a YAML file, or a preset's name.
Units: ranks, tokens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from .spec import Topology, TopologyError, parse_topology
from .yaml_file import parse_yaml_mapping, read_yaml_mapping

SINGLE_POOL = "serve"
_EXAMPLE = f"{SINGLE_POOL}: EP2DP1"
_A_POOL = "a pool is a named set of ranks with one topology"
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_RESERVED = ("about", "classes", "domains", "link")
_LINK_KEYS = {"megabytes_per_second": "rate", "delay_microseconds": "delay"}
_CLASS_KEYS = ("pools", "max_prompt_tokens", "priority")


@dataclass(frozen=True, kw_only=True)
class RequestClass:
    """Requests that take the same way.

    Attributes:
        name: unique in the layout.
        pools: names of the pools that such a request passes, in order.
        max_prompt_tokens: longest prompt of the class; None takes any. Classes are tried in file order.
        priority: of such a request unless it names its own; lower runs first.
    """

    name: str
    pools: tuple[str, ...]
    max_prompt_tokens: int | None = None
    priority: int = 0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Named pools, in file order, and the classes that use them.

    Attributes:
        pools: name -> topology, at least one.
        classes: name -> class; empty when every request is treated alike.
        about: a sentence for people.
    """

    pools: dict[str, Topology]
    classes: dict[str, RequestClass] = field(default_factory=dict)
    about: str = ""

    @property
    def num_ranks(self) -> int:
        """Ranks of all pools."""
        return sum(topology.num_ranks for topology in self.pools.values())

    def single(self) -> Topology:
        """Return the only pool's topology.

        Raises:
            TopologyError: there are several pools, or classes of requests, which this version plans but does not run.
        """
        if len(self.pools) == 1:
            if self.classes:
                raise TopologyError(
                    f"the layout has classes ({', '.join(self.classes)}), and treating requests by class is not "
                    "available in this version; leave classes out"
                )
            return next(iter(self.pools.values()))
        named = ", ".join(f"{name}: {topology.short()}" for name, topology in self.pools.items())
        widest = max(self.pools.values(), key=lambda topology: topology.num_ranks)
        raise TopologyError(
            f"the layout has separate pools ({named}), and running pools apart is not available in this version; "
            f"use one topology, for example --topology {widest.short()}"
        )

    def warnings(self) -> list[str]:
        """Return what reads like a slip, over all pools."""
        return [line for topology in self.pools.values() for line in topology.warnings()]


def preset_names() -> tuple[str, ...]:
    """Return the names of the layouts that come with moewe, sorted."""
    files = (resources.files(__package__) / "presets").iterdir()
    return tuple(sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml")))


def load_layout(text: str, *, dialect: str | None = None) -> Layout:
    """Return the layout that `text` means.

    Args:
        text: a topology (`EP2DP1`), pools on one line (`prefill: EP4DP16 | decode: EP64DP3`), a YAML file, or the
            name of a preset.
        dialect: how topologies spell DP, see `parse_topology`.

    Raises:
        TopologyError: none of these, or a file with unknown or wrong entries.
    """
    text = text.strip()
    if text in preset_names():
        preset = resources.files(__package__) / "presets" / f"{text}.yaml"
        data = parse_yaml_mapping(preset.read_text(encoding="utf-8"), where=f"preset {text}")
        return _from_mapping(data, where=f"preset {text}", dialect=None)
    if text.lower().endswith((".yaml", ".yml")):
        return _from_mapping(read_yaml_mapping(Path(text), example=_EXAMPLE), where=f"file {text!r}", dialect=dialect)
    if ":" in text:
        return _from_line(text, dialect)
    try:
        return Layout(pools={SINGLE_POOL: parse_topology(text, dialect=dialect)})
    except TopologyError as error:
        if text[:2].upper() == "EP" or any(digit in text for digit in "0123456789["):
            raise
        known = ", ".join(preset_names())
        raise TopologyError(f"topology {text!r} is neither EPxDPy, nor a .yaml file, nor a preset ({known})") from error


def _from_line(text: str, dialect: str | None) -> Layout:
    data: dict[str, Any] = {}
    for part in text.split("|"):
        name, colon, value = (piece.strip() for piece in part.partition(":"))
        if not colon or name in data:
            raise TopologyError(f"layout {text!r} is not of the form `prefill: EP4DP16 | decode: EP64DP3`")
        data[name] = value
    return _from_mapping(data, where=f"layout {text!r}", dialect=dialect)


def _from_mapping(data: dict[str, Any], *, where: str, dialect: str | None) -> Layout:
    about = data.get("about", "")
    if not isinstance(about, str):
        raise TopologyError(f"{where}: about must be text")
    pools = {}
    for name, value in data.items():
        if name in _RESERVED:
            continue
        if not _NAME.fullmatch(name):
            raise TopologyError(
                f"{where}: pool name {name!r} is not allowed ({_A_POOL}); use lower-case letters, digits, - and _"
            )
        if not isinstance(value, str):
            raise TopologyError(
                f"{where}: pool {name} is {value!r} ({_A_POOL}); write for example `{_EXAMPLE}`, and put flags into "
                "a file for --config"
            )
        try:
            pools[name] = parse_topology(value, dialect=dialect)
        except TopologyError as error:
            raise TopologyError(f"{where}: pool {name}: {error}") from error
    if not pools:
        raise TopologyError(f"{where} names no pool ({_A_POOL}); write for example `{_EXAMPLE}`")
    if "domains" in data or "link" in data:
        pools = _with_domains(pools, data, where=where)
    classes = data.get("classes") or {}
    if not isinstance(classes, dict):
        raise TopologyError(f"{where}: classes must be a mapping of class names to their settings")
    parsed = {str(name): _request_class(str(name), entry, pools, where=where) for name, entry in classes.items()}
    return Layout(pools=pools, classes=parsed, about=about)


def _with_domains(pools: dict[str, Topology], data: dict[str, Any], *, where: str) -> dict[str, Topology]:
    """Return the only pool with the domains of the file, and the link between them."""
    if len(pools) > 1:
        raise TopologyError(
            f"{where}: domains and link are for a layout with one pool; write them into each, like EP4DP1[domains=2+2]"
        )
    ((name, topology),) = pools.items()
    listed, link = data.get("domains", []), data.get("link", {})
    example = "domains lists ranks of a group, consecutive and all of them, like [[0, 1], [2, 3]]"
    if not isinstance(listed, list) or not all(isinstance(ranks, list) and ranks for ranks in listed):
        raise TopologyError(f"{where}: domains is {listed!r}; {example}")
    flat = [rank for ranks in listed for rank in ranks]
    if flat != list(range(len(flat))):
        raise TopologyError(f"{where}: domains is {listed!r}; {example}")
    if not isinstance(link, dict) or set(link) - set(_LINK_KEYS):
        unknown = (
            f"has the unknown key {min(set(link) - set(_LINK_KEYS))!r}" if isinstance(link, dict) else f"is {link!r}"
        )
        raise TopologyError(f"{where}: link {unknown}; known are {', '.join(_LINK_KEYS)}")
    slowed = {_LINK_KEYS[key]: value for key, value in link.items()}
    try:
        return {name: replace(topology, domains=tuple(map(len, listed)), **slowed)}
    except TopologyError as error:
        raise TopologyError(f"{where}: {error}") from error


def _request_class(name: str, entry: Any, pools: dict[str, Topology], *, where: str) -> RequestClass:
    where = f"{where}: class {name!r}"
    if not _NAME.fullmatch(name) or not isinstance(entry, dict):
        raise TopologyError(
            f"{where} must be a lower-case name with settings, like `short: {{pools: [{SINGLE_POOL}]}}`"
        )
    for key in entry:
        if key not in _CLASS_KEYS:
            raise TopologyError(f"{where} has the unknown key {key!r}; known are {', '.join(_CLASS_KEYS)}")
    way = entry.get("pools", list(pools))
    if not isinstance(way, list) or not way or any(pool not in pools for pool in way):
        raise TopologyError(f"{where}: pools is {way!r}; list pools of the layout: {', '.join(pools)}")
    limit, priority = entry.get("max_prompt_tokens"), entry.get("priority", 0)
    if limit is not None and (type(limit) is not int or limit < 1):
        raise TopologyError(f"{where}: max_prompt_tokens={limit!r} must be a whole number of at least 1")
    if type(priority) is not int:
        raise TopologyError(f"{where}: priority={priority!r} must be a whole number")
    return RequestClass(name=name, pools=tuple(way), max_prompt_tokens=limit, priority=priority)
