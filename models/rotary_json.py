"""The rotary embedding that a config.json asks for, in both generations of spelling, and how long its texts may be.

Not the frequencies themselves: this only reads and checks numbers. transformers 4 wrote `rope_theta` beside
`rope_scaling` {type | rope_type, ...}, transformers 5 writes all of it into `rope_parameters`; where several places say
the same thing, they must agree. Units: elements of a head, tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from .config import RotaryConfig, RotaryScaling
from .family import Family, switched
from .json_fields import Fields, show, show_name

MAX_POSITIONS, MAX_FACTOR, MAX_THETA = 1 << 30, 1e6, 1e12
_SECTIONS = ("rope_parameters", "rope_scaling")
_KIND, _ORIGINAL, _PART = "rope_type|type", "original_max_position_embeddings", "partial_rotary_factor"
_ANY_KIND = frozenset({"rope_type", "type", "rope_theta", _PART})
_FIELDS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor", _ORIGINAL}),
    "yarn": frozenset(
        {"factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
    ),
    "llama3": frozenset({"factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"}),
    "longrope": frozenset({"factor", _ORIGINAL, "attention_factor", "short_factor", "long_factor"}),
    # Of a fixed alpha only alpha counts; models carry the others along.
    "dynamic": frozenset({"alpha", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}),
}
_OWN_AMPLITUDES = frozenset({"short_mscale", "long_mscale"})
_N = TypeVar("_N", int, float)


@dataclass(frozen=True, kw_only=True)
class Positions:
    """What a config says about positions.

    Attributes:
        rotary: the embedding.
        max_position: longest sequence, stretched by the scaling where the config does not say the stretched length.
        score_factor: what the scores of latent attention are multiplied by, beside the root of the head's width.
    """

    rotary: RotaryConfig
    max_position: int
    score_factor: float = 1.0


def parse_positions(fields: Fields, family: Family, width: int) -> Positions:
    """Return what `fields` say about positions; `width` elements of a head may rotate."""
    max_position = fields.integer("max_position_embeddings", 1, MAX_POSITIONS)
    section = _merged_section(fields)
    kind = "default" if section.raw(_KIND) is None else section.raw(_KIND)
    if not isinstance(kind, str) or kind not in family.rope_kinds:
        known = ", ".join(family.rope_kinds)
        raise section.refuse(_KIND, kind, f"is a rotary embedding that this family does not have; it has: {known}")
    _refuse_unknown(section, kind, family)
    theta = _agreed("rope_theta", section, fields, lambda place: place.number("rope_theta", 0, MAX_THETA))
    if theta is None:
        theta = fields.number("rope_theta", 0, MAX_THETA, default=1e4)
    rotary_dim = _rotary_dim(fields, section, family, width)
    original = _agreed(_ORIGINAL, section, fields, lambda place: place.integer(_ORIGINAL, 2, MAX_POSITIONS))
    original = max_position if original is None else original
    scaling, score_factor = None, 1.0
    if kind == "dynamic":
        if width < 4:
            raise fields.refuse("head_dim", width, "is too small to stretch; it must be at least 4")
        theta *= section.number("alpha", 0, MAX_FACTOR) ** (width / (width - 2))
    elif kind == "linear":
        factor = section.number("factor", 1, MAX_FACTOR, closed=True)
        scaling = RotaryScaling(kind="linear", factor=factor)
        if section.raw(_ORIGINAL) is not None:
            max_position = max(max_position, int(original * factor))
    elif kind == "yarn":
        if theta <= 1:
            raise section.refuse("rope_theta", theta, "must be above 1 for yarn")
        scaling, score_factor = _yarn(section, original, max_position)
        max_position = max(max_position, int(original * scaling.factor))
    elif kind == "llama3":
        scaling = _llama3(section, original)
    elif kind == "longrope":
        scaling = _longrope(section, original, max_position, rotary_dim // 2, family.own_amplitudes)
    return Positions(
        rotary=RotaryConfig(
            theta=theta,
            rotary_dim=rotary_dim,
            interleaved=switched(fields, family.rotary_interleaved),
            scaling=scaling,
        ),
        max_position=min(max_position, MAX_POSITIONS),
        score_factor=score_factor,
    )


def _merged_section(fields: Fields) -> Fields:
    """Return the fields of both sections as one, or the default section where neither is there."""
    given = [fields.section(name) for name in _SECTIONS if fields.content.get(name)]
    if not given:
        default = fields.defaults.get(_SECTIONS[0], {})
        return Fields(content=dict(default), where=f"{fields.where}: {_SECTIONS[0]}", defaults={})
    if len(given) == 1:
        return given[0]
    first, second = given
    content = {k: v for k, v in first.content.items() if v is not None}
    if content.get("rope_type") is None and "type" in content:
        content["rope_type"] = content.pop("type")
    for name, value in second.content.items():
        name = "rope_type" if name == "type" else name
        if value is not None and content.setdefault(name, value) != value:
            why = f"contradicts {_SECTIONS[1]}: {show_name(name)} = {show(value)}; keep one of the two"
            raise first.refuse(name, content[name], why)
    return Fields(content=content, where=first.where, defaults={})


def _refuse_unknown(section: Fields, kind: str, family: Family) -> None:
    known = _ANY_KIND | _FIELDS[kind]
    if kind == "longrope" and family.own_amplitudes:
        known = known | _OWN_AMPLITUDES
    for name, value in section.content.items():
        if name not in known and value is not None:
            if section.raw(_KIND) is None:
                raise section.refuse(name, value, "stands without a rope_type that says its kind; add one or remove it")
            raise section.refuse(name, value, f"is not a field of the kind {kind}; remove it or use another model")


def _rotary_dim(fields: Fields, section: Fields, family: Family, width: int) -> int:
    stated = _agreed(_PART, section, fields, lambda place: place.number(_PART, 0, 1))
    factor = fields.number(_PART, 0, 1, default=1.0) if stated is None else stated
    if family.partial_rotary and fields.raw("rotary_dim") is not None:
        rotary_dim = fields.integer("rotary_dim", 2, width)
        if stated is not None and int(width * stated) != rotary_dim:
            raise fields.refuse("rotary_dim", rotary_dim, f"contradicts {_PART} = {factor:g}; keep one")
        factor = rotary_dim / width
    if factor != 1.0 and not family.partial_rotary:
        why = "rotates a part of each head, which this family does not do; remove it"
        raise fields.refuse(_PART, factor, why)
    rotary_dim = int(width * factor)
    if rotary_dim % 2 or rotary_dim < 2:
        why = f"leaves {rotary_dim} of head_dim = {width} elements to rotate; it must be an even number from 2 on"
        raise fields.refuse(_PART, factor, why)
    return rotary_dim


def _agreed(name: str, section: Fields, fields: Fields, read: Callable[[Fields], _N]) -> _N | None:
    """Return the number that both places say, or the one that says it, None where none does; they must agree."""
    given = [place for place in (section, fields) if place.content.get(name) is not None]
    values = [read(place) for place in given]
    if len(set(values)) > 1:
        why = f"contradicts {given[1].where}: {name} = {show(values[1])}; keep one of them"
        raise given[0].refuse(name, values[0], why)
    return values[0] if values else None


def _factor(section: Fields, original: int, max_position: int) -> float:
    return section.number("factor", 1, MAX_FACTOR, default=max(max_position / original, 1.0), closed=True)


def _yarn(section: Fields, original: int, max_position: int) -> tuple[RotaryScaling, float]:
    """Return the scaling and what latent scores are multiplied by (Peng et al., 2023; DeepSeek-AI, 2024)."""
    factor = _factor(section, original, max_position)
    mscale = section.number("mscale", 0, MAX_FACTOR, default=0.0, closed=True)
    mscale_all = section.number("mscale_all_dim", 0, MAX_FACTOR, default=0.0, closed=True)
    amplitude = _yarn_mscale(factor, 1.0)
    if mscale and mscale_all:
        amplitude = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all)
    fast = section.number("beta_fast", 0, MAX_FACTOR, default=32.0)
    slow = section.number("beta_slow", 0, MAX_FACTOR, default=1.0)
    if fast < slow:
        raise section.refuse("beta_fast", fast, f"must not be below beta_slow = {slow:g}")
    scaling = RotaryScaling(
        kind="yarn",
        factor=factor,
        original_max_position=original,
        amplitude=section.number("attention_factor", 0, MAX_FACTOR, default=amplitude),
        beta_fast=fast,
        beta_slow=slow,
        truncate=section.flag("truncate", default=True),
    )
    return scaling, _yarn_mscale(factor, mscale_all) ** 2 if mscale_all else 1.0


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0


def _llama3(section: Fields, original: int) -> RotaryScaling:
    low = section.number("low_freq_factor", 0, MAX_FACTOR)
    high = section.number("high_freq_factor", 0, MAX_FACTOR)
    if high < low:
        raise section.refuse("high_freq_factor", high, f"must not be below low_freq_factor = {low:g}")
    return RotaryScaling(
        kind="llama3",
        factor=section.number("factor", 1, MAX_FACTOR, closed=True),
        original_max_position=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _longrope(
    section: Fields, original: int, max_position: int, num_frequencies: int, own_amplitudes: bool
) -> RotaryScaling:
    factor = _factor(section, original, max_position)
    if own_amplitudes:
        short = section.number("short_mscale", 0, MAX_FACTOR)
        long = section.number("long_mscale", 0, MAX_FACTOR)
    else:
        default = math.sqrt(1 + math.log(factor) / math.log(original)) if original > 1 else 1.0
        short = long = section.number("attention_factor", 0, MAX_FACTOR, default=default)
    return RotaryScaling(
        kind="longrope",
        factor=factor,
        original_max_position=original,
        amplitude=short,
        long_amplitude=long,
        short_factors=section.numbers("short_factor", 0, MAX_FACTOR, num_frequencies),
        long_factors=section.numbers("long_factor", 0, MAX_FACTOR, num_frequencies),
    )
