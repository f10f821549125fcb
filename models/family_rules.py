"""What single entries of the table of families need beside names: groups, widths, activations, multipliers.

Not the table (`families`) and not about layers (`layer_rules`): each rule is a function of the fields.
Units: neurons, experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..moe.activation import Activation
from .config import QueryTemperature
from .family import MAX_WIDTH, Groups, SharedWidth
from .json_fields import Fields

MAX_GROUPS, MAX_SHARED, MAX_MULTIPLIER = 1024, 1024, 1e6


def always_grouped(fields: Fields) -> Groups:
    """The groups of n_group and topk_group."""
    return Groups(
        count=fields.integer("n_group", 1, MAX_GROUPS, default=1),
        chosen=fields.integer("topk_group", 1, MAX_GROUPS, default=1),
    )


def grouped_by_method(fields: Fields) -> Groups:
    """The groups of n_group and topk_group where topk_method asks for them, else none."""
    return always_grouped(fields) if fields.raw("topk_method") == "group_limited_greedy" else Groups()


def shared_count(name: str) -> SharedWidth:
    """Return the rule that a field says how many experts of the routed width the shared one is made of."""
    return lambda fields, width: width * fields.integer(name, 0, MAX_SHARED)


def shared_size(name: str, low: int = 1) -> SharedWidth:
    """Return the rule that a field says the width of the shared expert."""
    return lambda fields, _: fields.integer(name, low, MAX_WIDTH)


def as_wide_as_one(fields: Fields, width: int) -> int:
    """The shared expert is as wide as a routed one; a further field of widths may only repeat that one."""
    stated = fields.raw("moe_intermediate_size")
    if stated is not None and any(item != width for item in (stated if isinstance(stated, list) else [stated])):
        raise fields.refuse("moe_intermediate_size", stated, f"differs from intermediate_size = {width}; not supported")
    return width


def clamped(fields: Fields) -> Activation:
    """The clamped activation with its alpha and limit."""
    return Activation(
        kind="clamped",
        alpha=fields.number("swiglu_alpha", 0, MAX_MULTIPLIER),
        limit=fields.number("swiglu_limit", 0, MAX_MULTIPLIER),
    )


def four_multipliers(fields: Fields) -> Mapping[str, Any]:
    """The scale of scores and the factors on embeddings, on what blocks add, and (divided) on logits."""
    return {
        "attention_scale": fields.number("attention_multiplier", 0, MAX_MULTIPLIER, default=1.0),
        "embedding_multiplier": fields.number("embedding_multiplier", 0, MAX_MULTIPLIER, default=1.0),
        "residual_multiplier": fields.number("residual_multiplier", 0, MAX_MULTIPLIER, default=1.0),
        "logits_multiplier": 1.0 / fields.number("logits_scaling", 0, MAX_MULTIPLIER, default=1.0),
    }


def query_temperature(fields: Fields) -> Mapping[str, Any]:
    """The growth of queries of layers without rotary, where attn_temperature_tuning is on."""
    # The first released files hold the number 4 for true.
    on = fields.raw("attn_temperature_tuning") == 4 or fields.flag("attn_temperature_tuning", default=True)
    if not on:
        return {}
    temperature = QueryTemperature(
        scale=fields.number("attn_scale", 0, MAX_MULTIPLIER, default=0.1, closed=True),
        floor_scale=fields.number("floor_scale", 0, 1 << 30, default=8192),
    )
    return {"query_temperature": temperature}
