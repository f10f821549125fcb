"""What the Triton kernels of one rank are launched for: handed to whatever part of a model may launch them.

Not a kernel and not a choice between kernels and torch (models/kernels/choice.py). A part that got none runs with
torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from .targets import GpuTarget


@dataclass(frozen=True, kw_only=True)
class GpuKernels:
    """How kernels are launched.

    Attributes:
        target: the GPU.
        batch_invariant: a row's bits depend on that row alone, not on how many others are computed with it.
    """

    target: GpuTarget
    batch_invariant: bool = False
