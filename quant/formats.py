"""Number formats of weights, activations and KV: their names, widths and torch types.

Not a quantiser and not a kernel: only the table that everybody reads, so that a format is spelled in one place.
Units: bytes per element. Formats that pack several elements in a byte are schemes of `tensor`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """One number format: `name` as config.json spells it, and the torch type that holds it."""

    name: str
    torch_dtype: torch.dtype

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.torch_dtype.itemsize


FORMATS: dict[str, NumberFormat] = {
    "float32": NumberFormat(name="float32", torch_dtype=torch.float32),
    "bfloat16": NumberFormat(name="bfloat16", torch_dtype=torch.bfloat16),
    "float16": NumberFormat(name="float16", torch_dtype=torch.float16),
}
_ALIASES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


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
