"""The GPUs that torch sees on this host: how many, how much memory each has, and the libraries that torch uses there.

Not a reservation and not a measurement; nothing is allocated on them here. What the driver says of GPUs is in
native/gpu_inventory.py.
Units: bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

_NCCL = Path("nccl", "lib", "libnccl.so.2")  # in the package `nvidia`


def gpu_memory_bytes() -> tuple[int, ...]:
    """Return the memory of each visible GPU, in the order of their indices.

    Raises:
        ValueError: there is none, or this torch cannot use it; one line with the fix.
    """
    import torch

    if torch.version.cuda is None:
        raise ValueError(
            "device='cuda' needs a CUDA build of torch, this one is for CPUs; install one or use --device cpu"
        )
    if not torch.cuda.is_available():
        raise ValueError("device='cuda', but torch sees no GPU; check the driver (nvidia-smi) or use --device cpu")
    return tuple(torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count()))


def torch_cuda() -> str | None:
    """Return the CUDA that torch was built with; None: it is for CPUs."""
    import torch

    return torch.version.cuda


def torch_nccl() -> str:
    """Return version and file of the NCCL that torch calls, or that it has none."""
    import torch

    if torch.version.cuda is None or not torch.distributed.is_nccl_available():
        return "none: this torch has no NCCL"
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    spec = find_spec("nvidia")
    folders = [Path(folder) for folder in spec.submodule_search_locations or []] if spec else []
    return f"{version}, {nccl_file(_mapped_files(), folders)}"


def nccl_file(mapped: Iterable[str], folders: Iterable[Path]) -> str:
    """Return which NCCL is loaded.

    Args:
        mapped: files mapped into this process.
        folders: of the package `nvidia`, where the one lies that would be loaded.
    """
    loaded = next((path for path in mapped if "libnccl.so" in path), None)
    if loaded is not None:
        return loaded
    found = next((folder / _NCCL for folder in folders if (folder / _NCCL).exists()), None)
    return "built into torch" if found is None else f"{found} (not loaded yet)"


def _mapped_files() -> list[str]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    return [parts[5] for parts in (line.split(maxsplit=5) for line in lines) if len(parts) > 5]
