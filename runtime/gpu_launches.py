"""Every kernel launch on a GPU that serving the published models makes, by model and size of a step.

Not a runtime path: benchmarks/gpu_kernels.py compiles them without a GPU, and tests hold what came of it against rules.
Units: tokens of a step on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..models.config import ModelConfig
from ..models.kernels.launches import layer_launches
from ..models.published import published_config
from ..moe.kernels.launches import MoEShapes, moe_launches
from ..native.gpu import GpuTarget, Launch

MODELS = ("mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3", "gpt-oss-120b", "glm-4.5")
STEP_TOKENS = (1, 16, 256, 8192)


class Use(NamedTuple):
    """A launch and where it occurs."""

    model: str
    num_tokens: int
    launch: Launch


def published_launches(target: GpuTarget) -> Iterator[Use]:
    """Yield the launches of all models, the same machine code several times."""
    for name in MODELS:
        shapes = moe_shapes(published_config(name))
        for num_tokens in STEP_TOKENS:
            for launch in moe_launches(shapes, num_tokens, target):
                yield Use(name, num_tokens, launch)
        # The size of a step changes the grids of these, not their code.
        for launch in layer_launches(published_config(name), 1, target):
            yield Use(name, 1, launch)


def moe_shapes(config: ModelConfig) -> MoEShapes:
    """Return what the MoE kernels of a model depend on."""
    assert config.moe is not None
    return MoEShapes(width=config.hidden_size, top_k=config.moe.routing.top_k)
