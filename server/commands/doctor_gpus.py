"""The GPUs of this machine as `moewe doctor` tells of them: what NVML says, torch's CUDA and NCCL, and what to mend.

Not a measurement; no GPU is touched. Units: bytes, megahertz.
"""

from __future__ import annotations

import dataclasses

from ...native.gpu_inventory import HARMLESS_REASONS, GpuInventory, GpuRecord, gpu_inventory
from ...runtime.gpus import torch_cuda, torch_nccl


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuFindings:
    """What is known of the GPUs.

    Attributes:
        inventory: by NVML.
        torch_cuda: the CUDA that torch was built with; None: a torch for CPUs.
        nccl: version and file of the collectives that torch calls, or why there are none.
    """

    inventory: GpuInventory
    torch_cuda: str | None
    nccl: str


def gpu_findings() -> GpuFindings:
    """Look; imports torch."""
    return GpuFindings(inventory=gpu_inventory(), torch_cuda=torch_cuda(), nccl=torch_nccl())


def gpu_lines(found: GpuFindings) -> dict[str, str]:
    """Return name -> text of what goes beyond memory; nothing where there is neither a GPU nor a torch for one."""
    inventory, lines = found.inventory, dict[str, str]()
    if inventory.gpus or found.torch_cuda is not None:
        lines["driver"] = (
            f"{inventory.driver or 'unknown'}, CUDA {inventory.cuda_driver or 'unknown'} at most; "
            f"torch is for {'CPUs' if found.torch_cuda is None else f'CUDA {found.torch_cuda}'}"
        )
        lines["NCCL"] = found.nccl
    for gpu in inventory.gpus:
        lines[f"GPU {gpu.index}"] = _gpu_line(gpu)
        if gpu.unread:
            lines[f"GPU {gpu.index}, not read"] = "; ".join(gpu.unread)
    if len(inventory.gpus) > 1:
        lines["NVLink domains"] = ", ".join("+".join(map(str, domain)) for domain in inventory.domains)
        lines["P2P, row reads from column"] = " ".join(f"{gpu.index:>6}" for gpu in inventory.gpus)
        for gpu, row in zip(inventory.gpus, inventory.p2p):
            lines[f"{gpu.index:>26}"] = " ".join(f"{how:>6}" for how in row)
    return lines


def _gpu_line(gpu: GpuRecord) -> str:
    parts = [gpu.name]
    if gpu.memory_bytes is not None and gpu.used_bytes is not None:
        parts.append(f"{_gib(gpu.memory_bytes)}, {_gib(gpu.memory_bytes - gpu.used_bytes)} free")
    for name, clock in (("SM", gpu.sm_mhz), ("memory", gpu.memory_mhz)):
        if clock is not None:
            parts.append(f"{name} {clock[0]} of {clock[1]} MHz")
    if gpu.slowed_by:
        parts.append(f"clocks: {', '.join(gpu.slowed_by)}")
    if gpu.has_gpm is not None:
        parts.append("GPM" if gpu.has_gpm else "no GPM")
    if gpu.links is not None:
        parts.append("NVLink " + (" ".join(f"{number} to {end}" for end, number in gpu.links.items()) or "none"))
    if gpu.fabric:
        parts.append(gpu.fabric)
    return "; ".join(parts)


def gpu_fixes(found: GpuFindings) -> list[str]:
    """Return what keeps GPUs from being used, or from their speed."""
    inventory, fixes = found.inventory, list[str]()
    if not inventory.gpus:
        return fixes
    if found.torch_cuda is None:
        fixes.append(f"there are {len(inventory.gpus)} GPUs, but this torch is for CPUs; install a CUDA build of torch")
    elif inventory.cuda_driver is not None and _major(found.torch_cuda) > _major(inventory.cuda_driver):
        fixes.append(
            f"torch is for CUDA {found.torch_cuda}, but the driver {inventory.driver} runs {inventory.cuda_driver} at "
            "most; install a newer driver or a torch for that CUDA"
        )
    for gpu in inventory.gpus:
        slowing = [reason for reason in gpu.slowed_by or () if reason not in HARMLESS_REASONS]
        if slowing:
            fixes.append(f"GPU {gpu.index} is slowed down: {', '.join(slowing)}; look at its cooling and power limit")
    if len(inventory.domains) > 1:
        fixes.append(
            f"{len(inventory.gpus)} GPUs are {len(inventory.domains)} NVLink domains: exchanges between them are slow; "
            "choose groups that stay inside one (EPx with x GPUs of one domain)"
        )
    return fixes


def _major(version: str) -> int:
    return int(version.split(".")[0])


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
