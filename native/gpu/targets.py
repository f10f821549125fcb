"""GPUs that kernels are compiled and tuned for, as far as a choice of tiles must know them.

Not bandwidths and rates (topologies/hardware/) and not a look at this machine. Units: bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_CAPABILITY = 80  # of GPUs that kernels run on: compute capability times ten


@dataclass(frozen=True, kw_only=True)
class GpuTarget:
    """One kind of GPU.

    Attributes:
        capability: compute capability times ten.
        num_sms: streaming multiprocessors.
        shared_bytes: of shared memory that one program may take, at most.
    """

    capability: int
    num_sms: int
    shared_bytes: int

    @property
    def name(self) -> str:
        """As compilers call it."""
        return f"sm_{self.capability}"

    @property
    def has_fp8(self) -> bool:
        """Whether instructions convert e4m3; elsewhere kernels decode it from bytes."""
        return self.capability >= 89


# A100, H100 and H200, B200: CUDA C++ Programming Guide, technical specifications by compute capability (shared memory
# of a thread block); multiprocessors from the data sheets.
TARGETS = {
    80: GpuTarget(capability=80, num_sms=108, shared_bytes=163 << 10),
    90: GpuTarget(capability=90, num_sms=132, shared_bytes=227 << 10),
    100: GpuTarget(capability=100, num_sms=148, shared_bytes=227 << 10),
}
