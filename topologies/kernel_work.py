"""What a kernel must move and multiply at least, and how long a GPU takes for that at best: a roofline.

Not a measurement and not the cost of a layout (cost.py). Launches, latencies and caches are left out: a floor.
Packages that own kernels say what each of theirs must do (`<package>/kernels/roofline.py`). Units: bytes, operations,
seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from .planner.architecture import BF16
from .planner.hardware import Hardware


@dataclass(frozen=True, kw_only=True)
class Work:
    """Bytes that cross the memory's pins, and operations of products (two for a product and a sum)."""

    bytes: float
    flops: float = 0.0

    def seconds(self, hardware: Hardware) -> float:
        """Return the time of whichever takes longer; codes are multiplied as bf16."""
        return self.seconds_at(hardware.memory_bandwidth, hardware.flops(BF16))

    def seconds_at(self, bandwidth: float, rate: float) -> float:
        """Return the same from bytes/s and operations/s."""
        return max(self.bytes / bandwidth, self.flops / rate)

    def is_bound_by_memory(self, hardware: Hardware) -> bool:
        """Return whether bytes take longer than products."""
        return self.bytes / hardware.memory_bandwidth >= self.flops / hardware.flops(BF16)
