"""What all Triton kernels share: a launch as a record, and compiling it without a GPU (level 0; imports no Triton)."""

from .kernels import GpuKernels
from .launch import Launch, interpreting
from .targets import TARGETS, GpuTarget

__all__ = ["TARGETS", "GpuKernels", "GpuTarget", "Launch", "interpreting"]
