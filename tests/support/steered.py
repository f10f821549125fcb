"""A checkpoint whose router is told what to choose.

Not scripted tokens (chain.py): only the choice of experts is forced.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.fixtures import checkpoint, copy_checkpoint, rewrite_tensors


def steered(*experts: int, **config: Any) -> Path:
    """Return a glm4_moe checkpoint of 8 experts whose selection bias puts `experts` into every token's choice."""

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name, tensor in tensors.items():
            if name.endswith("e_score_correction_bias"):
                tensor.zero_()
                tensor[list(experts)] = 100.0
        return tensors

    folder = checkpoint("T-GLM-demo", n_routed_experts=8, routed_scaling_factor=1.0, **config)
    return rewrite_tensors(copy_checkpoint(folder), change)
