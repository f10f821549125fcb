"""Which parts of a model a device runs in Triton kernels, and why others not: settled once a rank, before it loads.

Not a kernel. Experts are decided by their format, layer by layer (`moe.kernels.experts.can_multiply`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...moe.layer import MoELayer
from ...native.gpu import TARGETS, GpuKernels, GpuTarget, interpreting
from ...native.gpu.targets import LEAST_CAPABILITY
from ..config import ModelConfig

_NARROWEST_HEAD = 16  # tiles of tensor cores


@dataclass(frozen=True, kw_only=True)
class KernelChoice:
    """What runs in kernels of a GPU.

    Attributes:
        rows: norms, choice of experts, experts; None leaves them to torch or to a CPU's kernels.
        attention: attention and what is between its products.
        reasons: why something is left to torch, one line each.
    """

    rows: GpuKernels | None = None
    attention: GpuKernels | None = None
    reasons: tuple[str, ...] = ()


TORCH = KernelChoice()


def choose_kernels(
    config: ModelConfig, device: torch.device, *, asked: str = "auto", batch_invariant: bool = False
) -> KernelChoice:
    """Return what of a model runs in kernels on `device`.

    Args:
        config: of the model.
        device: of the rank.
        asked: `auto`, `torch` or `triton`. `auto` means Triton on a GPU and nothing on a CPU; `triton` on a CPU means
            Triton's interpreter, which tests use.
        batch_invariant: see `GpuKernels`.
    """
    if asked == "torch" or (asked == "auto" and device.type != "cuda"):
        return TORCH if device.type != "cuda" else KernelChoice(reasons=("all of it: --kernels torch",))
    target = target_of(device)
    if target.capability < LEAST_CAPABILITY:
        return KernelChoice(
            reasons=(f"all of it: the GPU has compute capability {target.capability / 10}, kernels need 8.0",)
        )
    kernels = GpuKernels(target=target, batch_invariant=batch_invariant)
    latent = config.latent
    width = config.head_dim if latent is None else latent.kv_rank + latent.rope_dim
    if width < _NARROWEST_HEAD:
        reason = f"attention: heads of {width} elements, kernels need {_NARROWEST_HEAD}"
        return KernelChoice(rows=kernels, reasons=(reason,))
    return KernelChoice(rows=kernels, attention=kernels)


def kernel_report(choice: KernelChoice, layers: Sequence[MoELayer]) -> tuple[str, ...]:
    """Return a line on what runs in kernels of a GPU, and one on each part that torch runs; nothing on a CPU alone.

    Args:
        choice: of the rank.
        layers: the MoE layers of its decoder.
    """
    reasons, parts = [f"torch runs {reason}" for reason in choice.reasons], []
    if choice.rows is None:
        return tuple(reasons)
    by_kernels = sum(layer.runs_in_kernels for layer in layers)
    if by_kernels:
        parts.append("experts")
    if by_kernels < len(layers):
        left = f"{len(layers) - by_kernels} of {len(layers)} MoE layers"
        reasons.append(f"torch runs experts of {left}: no kernel reads their format")
    if choice.attention is not None:
        parts.append("attention")
    fixed = ", batch-invariant" if choice.rows.batch_invariant else ""
    return f"Triton runs {', '.join(['norms', *parts])} ({choice.rows.target.name}{fixed})", *reasons


def target_of(device: torch.device) -> GpuTarget:
    """Return what tiles are chosen for on `device`; in the interpreter an H100."""
    if device.type != "cuda":
        assert interpreting(), "Triton kernels on a CPU run in the interpreter only"
        return TARGETS[90]
    found = torch.cuda.get_device_properties(device)
    capability = 10 * found.major + found.minor
    known = TARGETS.get(capability, TARGETS[80])
    shared = getattr(found, "shared_memory_per_block_optin", known.shared_bytes)
    return GpuTarget(capability=capability, num_sms=found.multi_processor_count, shared_bytes=shared)
