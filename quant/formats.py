"""Number formats of weights, activations and KV: their names, widths and torch types.

Not a quantiser and not a kernel: only the tables that everybody reads, so that a format is spelled in one place.
Whoever only plans with them does without torch. Units: bytes per element. Formats that pack several elements in a byte
are schemes (scheme.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """One number format.

    Attributes:
        name: as config.json spells it, or as users name a format of KV.
        torch_name: of the torch type that holds an element.
        itemsize: bytes of one element.
        largest: of a format of KV whose elements have scales: the largest element. 0 where elements are the values.
    """

    name: str
    torch_name: str
    itemsize: int
    largest: float = 0.0

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch type that holds an element."""
        return torch_dtype(self.torch_name)

    @property
    def is_scaled(self) -> bool:
        """Whether elements are multiplied by a scale that stands beside them."""
        return self.largest > 0

    @property
    def scale_itemsize(self) -> int:
        """Bytes of a scale."""
        return SCALE_FORMAT.itemsize if self.is_scaled else 0


FORMATS: dict[str, NumberFormat] = {
    "float32": NumberFormat(name="float32", torch_name="float32", itemsize=4),
    "bfloat16": NumberFormat(name="bfloat16", torch_name="bfloat16", itemsize=2),
    "float16": NumberFormat(name="float16", torch_name="float16", itemsize=2),
}
SCALE_FORMAT = FORMATS["bfloat16"]  # of scales of KV
# What KV can be besides: elements of one byte and a scale a token and KV head (kvcache/scaled.py).
KV_FORMATS: dict[str, NumberFormat] = {
    "fp8": NumberFormat(name="fp8", torch_name="float8_e4m3fn", itemsize=1, largest=448.0),
    "int8": NumberFormat(name="int8", torch_name="int8", itemsize=1, largest=127.0),
}
_KV_ALIASES = {"fp8_e4m3": "fp8", "fp8_per_token_head": "fp8", "int8_per_token_head": "int8"}
_ALIASES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch type called `name`."""
    import torch

    found = getattr(torch, name)
    assert isinstance(found, torch.dtype), name
    return found


def parse_format(name: str) -> NumberFormat:
    """Return the format called `name` (`bfloat16`, `bf16`, `torch.bfloat16`, ...).

    Raises:
        ValueError: the name is not a known format; the message lists the known ones.
    """
    key = name.strip().lower().removeprefix("torch.")
    key = _ALIASES.get(key, key)
    if key not in FORMATS:
        known = ", ".join([*FORMATS, *_ALIASES])
        raise ValueError(f"dtype {name!r} is not a number format that moewe knows; use one of: {known}")
    return FORMATS[key]


def parse_kv_format(name: str, model: NumberFormat) -> NumberFormat:
    """Return the format of KV called `name` beside a model that runs in `model`; `auto` is the model's.

    Raises:
        ValueError: KV is not kept in such a format, or not beside this one.
    """
    key = name.strip().lower()
    key = _KV_ALIASES.get(key, key)
    if key == "auto":
        return model
    if key in KV_FORMATS:
        return KV_FORMATS[key]
    allowed = dict.fromkeys((model.name, "bfloat16"))
    try:
        found = parse_format(key)
    except ValueError:
        found = None
    if found is None or found.name not in allowed:
        raise ValueError(
            f"kv_cache_dtype={name!r} is not available with dtype {model.name}; "
            f"use {', '.join(['auto', *allowed, *KV_FORMATS])}"
        )
    return found
