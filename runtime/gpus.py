"""The GPUs that torch sees on this host: how many, and how much memory each has.

Not a reservation and not a measurement; nothing is allocated on them here.
Units: bytes.
"""

from __future__ import annotations


def gpu_memory_bytes() -> tuple[int, ...]:
    """Return the memory of each visible GPU, in the order of their indices.

    Raises:
        ValueError: there is none, or this torch cannot use it; one line with the fix.
    """
    import torch

    if torch.version.cuda is None:
        raise ValueError(
            "device='cuda' needs a CUDA build of torch, this one is for CPUs; install one or use --device cpu"
        )
    if not torch.cuda.is_available():
        raise ValueError("device='cuda', but torch sees no GPU; check the driver (nvidia-smi) or use --device cpu")
    return tuple(torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count()))
