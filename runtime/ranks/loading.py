"""How a rank reads its weights and what it runs them with, from the engine's options.

Not the reading (models/loading.py) and not the choice of kernels (models/kernels/choice.py).
"""

from __future__ import annotations

import torch

from ...attention.native_formats import serves
from ...attention.tensor_parallel import HeadShare
from ...models.config import ModelConfig
from ...models.kernels.choice import KernelChoice, choose_kernels
from ...models.loading import LoadOptions
from ...moe.wide_ep.placement import ExpertPlacement
from ...native.library import set_threads
from ...quant import NumberFormat, can_pack, weight_scheme
from ..config import EngineConfig


def device_of(config: EngineConfig) -> torch.device:
    """Return the device of this rank: of GPUs the current one by its number, which every thread takes for the same."""
    name = config.parallel.device
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def kernels_of(config: EngineConfig, model: ModelConfig, device: torch.device) -> KernelChoice:
    """Return what of `model`, or of this rank's share of it, runs in kernels of a GPU."""
    parallel = config.parallel
    return choose_kernels(model, device, asked=parallel.kernels, batch_invariant=parallel.batch_invariant)


def attends_natively(config: EngineConfig, number_format: NumberFormat, device: torch.device) -> bool:
    """Tell whether attention runs in native kernels of a CPU."""
    return config.parallel.kernels == "auto" and serves(number_format, device.type)


def load_options(
    config: EngineConfig,
    number_format: NumberFormat,
    placement: ExpertPlacement,
    rank: int,
    share: HeadShare,
) -> LoadOptions:
    """Return how `rank` reads its weights. Where native kernels multiply them, those get their threads here."""
    options, device = config.model, device_of(config)
    native = config.parallel.kernels == "auto" and can_pack(number_format.torch_dtype, device)
    if native:
        set_threads(torch.get_num_threads())
    return LoadOptions(
        dtype=number_format.torch_dtype,
        placement=placement,
        rank=rank,
        device=device,
        dummy=options.load_format == "dummy",
        seed=options.seed,
        num_threads=torch.get_num_threads(),
        pack=native,
        scheme=weight_scheme(options.quantization) if options.quantization else None,
        share=share,
    )
