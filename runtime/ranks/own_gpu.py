"""What a process settles once about the GPU of its rank, before anything is loaded.

Not the choice of a GPU (the launcher numbers them) and not what runs on it.
"""

from __future__ import annotations

import torch

from ...native.gpu.driver import start_driver


def take_gpu(index: int) -> None:
    """Let this process use GPU number `index` of those that it sees.

    Raises:
        ValueError: Triton cannot launch kernels; one line with the reason and what is needed.
    """
    torch.cuda.set_device(index)
    # Products in fp32 (routers) are that, whatever the environment says: NVIDIA's containers ask for TF32.
    torch.set_float32_matmul_precision("highest")
    start_driver()
