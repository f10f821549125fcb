"""What a process settles once about the GPU of its rank, before anything is loaded, and whether kernels run there.

Not the choice of a GPU (the launcher numbers them) and not what runs on it.
"""

from __future__ import annotations

from functools import cache

import torch

from ...native.gpu.driver import start_driver
from ...native.gpu.targets import LEAST_CAPABILITY


def take_gpu(index: int) -> None:
    """Let this process use GPU number `index` of those that it sees.

    Raises:
        ValueError: Triton cannot launch kernels; one line with the reason and what is needed.
    """
    torch.cuda.set_device(index)
    # Products in fp32 (routers) are that, whatever the environment says: NVIDIA's containers ask for TF32.
    torch.set_float32_matmul_precision("highest")
    if runs_kernels(torch.device("cuda", index)):
        start_driver()


@cache
def runs_kernels(device: torch.device) -> bool:
    """Tell whether the GPU `device` is new enough for Triton; torch does the work of kernels on others."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor >= LEAST_CAPABILITY
