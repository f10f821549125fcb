"""The router's product of few rows on a GPU, in fp32: a decode step's, whose rows need no copy in fp32 for it.

Not the choice of experts (route.py). Of more rows torch multiplies, or linear.py where bits may not depend on them.
Letters: T rows, E experts, D width.
"""

from __future__ import annotations

import torch

from ...native.gpu import Launch

MOST_ROWS = 16  # each four of them read all of the matrix
_ROWS, _EXPERTS, _BLOCK_K = 4, 2, 512


def triton_router(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x weight^T + bias: x [T, D], weight [E, D] f32, bias [E] f32 -> [T, E] f32.

    A row has the same bits whatever rows are with it.
    """
    launch, logits = router_launch(x, weight, bias)
    launch.run()
    return logits


def router_launch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[Launch, torch.Tensor]:
    """Return the launch behind `triton_router` and where its result will stand."""
    from .router_triton import router_kernel

    (num_rows, width), num_experts = x.shape, len(weight)
    assert weight.shape == (num_experts, width) and weight.dtype == torch.float32, (weight.shape, weight.dtype)
    assert x.is_contiguous() and weight.is_contiguous(), (x.stride(), weight.stride())
    assert bias is None or (bias.shape == (num_experts,) and bias.dtype == torch.float32), bias
    logits = torch.empty(num_rows, num_experts, device=x.device)
    launch = Launch(
        kernel=router_kernel,
        grid=(-(-num_experts // _EXPERTS), -(-num_rows // _ROWS)),
        arguments={
            "x": x, "weight": weight, "bias": bias, "logits": logits, "num_rows": num_rows,
            "num_experts": num_experts, "width": width,
        },
        constants={"ROWS": _ROWS, "EXPERTS": _EXPERTS, "BLOCK_K": _BLOCK_K},
    )  # fmt: skip
    return launch, logits
