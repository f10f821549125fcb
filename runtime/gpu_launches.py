"""Every kernel launch on a GPU that serving the published models makes, as far as its code differs, by model.

Not a runtime path: benchmarks/gpu_kernels.py compiles them without a GPU, and tests hold what came of it against rules.
Units: none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..models.config import ModelConfig
from ..models.kernels.launches import layer_launches
from ..models.kernels.projections import projection_launches
from ..models.published import published_config
from ..moe.kernels.launches import PLAIN, MoEShapes, moe_launches
from ..native.gpu import GpuTarget, Launch
from .ranks.kernels.launches import sampling_launches

# Published models, and formats in which their experts are held: that of the checkpoint, bf16, and others that fit.
MODELS: dict[str, tuple[str, ...]] = {
    "mixtral-8x7b": ("bf16", "fp8 tensor", "int8 channel"),
    "qwen3-30b-a3b": ("bf16", "fp8 128x128", "int4 32", "int4 128 symmetric"),
    "qwen3-235b-a22b": ("bf16", "fp8 128x128", "int4 64"),
    "deepseek-v3": ("fp8 128x128", "int4 128"),
    "gpt-oss-120b": ("mxfp4",),
    "glm-4.5": ("bf16", "fp8 channel"),
}
EXPERTS_ALONE = "mxfp4"  # checkpoints store nothing else in it


class Use(NamedTuple):
    """A launch and where it occurs."""

    model: str
    launch: Launch


def published_launches(target: GpuTarget) -> Iterator[Use]:
    """Yield every launch of all models that differs in its code, for steps of any size; some of them several times."""
    for name, formats in MODELS.items():
        config = published_config(name)
        for launch in _launches(config, formats, target):
            yield Use(name, launch)


def _launches(config: ModelConfig, formats: tuple[str, ...], target: GpuTarget) -> Iterator[Launch]:
    yield from moe_launches(moe_shapes(config, formats), target)
    yield from layer_launches(config, target)
    for format_name in (PLAIN, *(name for name in formats if name not in (PLAIN, EXPERTS_ALONE))):
        yield from projection_launches(config, format_name, target)
    yield from sampling_launches(config.vocab_size, config.hidden_size)


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
