"""What all Triton kernels share: a launch as a record, and compiling it without a GPU (level 0; imports no Triton)."""

from .launch import Launch, interpreting
from .targets import TARGETS, GpuTarget

__all__ = ["TARGETS", "GpuTarget", "Launch", "interpreting"]
