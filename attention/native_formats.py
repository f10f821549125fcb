"""Which formats native attention computes.

Not the call (native.py). No torch: a start asks before ranks are there.
"""

from __future__ import annotations

from ..native.library import load
from ..quant import NumberFormat


def serves(number_format: NumberFormat, device: str) -> bool:
    """Tell whether native attention computes rows of this format on this device, over any KV that goes with them."""
    return device.partition(":")[0] == "cpu" and number_format.name == "bfloat16" and load() is not None
