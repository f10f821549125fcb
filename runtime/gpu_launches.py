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
from .ranks.kernels.launches import sampling_launches

STEP_TOKENS = (1, 16, 256, 8192)
# Published models, and formats in which their experts are held: that of the checkpoint, bf16, and others that fit.
MODELS: dict[str, tuple[str, ...]] = {
    "mixtral-8x7b": ("bf16", "int8 channel"),
    "qwen3-30b-a3b": ("bf16", "fp8 128x128", "int4 32"),
    "qwen3-235b-a22b": ("bf16", "fp8 128x128"),
    "deepseek-v3": ("fp8 128x128", "int4 128"),
    "gpt-oss-120b": ("mxfp4",),
    "glm-4.5": ("bf16", "fp8 channel"),
}


class Use(NamedTuple):
    """A launch and where it occurs."""

    model: str
    num_tokens: int
    launch: Launch


def published_launches(target: GpuTarget) -> Iterator[Use]:
    """Yield the launches of all models, the same machine code several times."""
    for name, formats in MODELS.items():
        config = published_config(name)
        shapes = moe_shapes(config, formats)
        for num_tokens in STEP_TOKENS:
            for launch in moe_launches(shapes, num_tokens, target):
                yield Use(name, num_tokens, launch)
        # The size of a step changes the grids of these, not their code.
        for launch in (*layer_launches(config, 1, target), *sampling_launches(config.vocab_size)):
            yield Use(name, 1, launch)


def moe_shapes(config: ModelConfig, formats: tuple[str, ...]) -> MoEShapes:
    """Return what the MoE kernels of a model depend on, with experts in each of `formats`."""
    moe = config.moe
    assert moe is not None
    return MoEShapes(
        width=config.hidden_size,
        ffn_width=moe.expert_width,
        routing=moe.routing,
        has_selection_bias=moe.selection_bias,
        activation=moe.activation,
        has_biases=moe.expert_bias,
        formats=formats,
    )
