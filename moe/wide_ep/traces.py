"""A routing trace: which experts the tokens of each MoE layer chose, by phase; on disk as .npz without pickle.

Not a recorder (the runtime fills one) and not synthetic (synthetic.py makes those).
Shapes: ids [L, T, K] i32 for each phase, -1 for a dropped choice. L MoE layers, T tokens, K top-k, E experts.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .placement.measures import expert_load

PHASES = ("prefill", "decode")
# Of all arrays of a file together, when read: a trace of 61 layers, top-8 and a million tokens has half of it.
MAX_BYTES = 4 << 30
_VERSION = 1
_HEADER = "header"
_HEADER_KINDS = (np.dtype(np.int64),)
_ID_KINDS = (np.dtype(np.int16), np.dtype(np.int32))


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutingTrace:
    """What was chosen, in the order of tokens.

    Attributes:
        num_experts: E.
        num_groups: equal runs of experts of which the router picked few a token; 1 where it knows no groups.
        ids: `prefill` and `decode`, or one of them: [L, T, K] i32 each, with the same L and K.
    """

    num_experts: int
    num_groups: int = 1
    ids: dict[str, np.ndarray]

    def __post_init__(self) -> None:
        if not 1 <= self.num_experts <= 1 << 20:
            raise ValueError(f"num_experts must be in [1, {1 << 20}], got {self.num_experts}")
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise ValueError(f"num_groups must divide num_experts={self.num_experts}, got {self.num_groups}")
        if not self.ids or not set(self.ids) <= set(PHASES):
            raise ValueError(f"ids must be of phases {', '.join(PHASES)}, got {', '.join(self.ids) or 'none'}")
        for phase, ids in self.ids.items():
            if ids.ndim != 3 or not ids.shape[0] or not ids.shape[2] or ids.dtype != np.int32:
                raise ValueError(f"{phase} must be i32 [layers, tokens, top-k], got {ids.dtype} {ids.shape}")
            if ids.size and (ids.min() < -1 or ids.max() >= self.num_experts):
                raise ValueError(
                    f"{phase} has ids from {ids.min()} to {ids.max()}; use -1 to {self.num_experts - 1} "
                    f"(num_experts={self.num_experts})"
                )
        if len({(ids.shape[0], ids.shape[2]) for ids in self.ids.values()}) > 1:
            shapes = ", ".join(f"{phase} {ids.shape}" for phase, ids in self.ids.items())
            raise ValueError(f"all phases must have the same layers and top-k, got {shapes}")

    @property
    def num_layers(self) -> int:
        """L."""
        return int(next(iter(self.ids.values())).shape[0])

    @property
    def top_k(self) -> int:
        """K."""
        return int(next(iter(self.ids.values())).shape[2])

    def num_tokens(self, phase: str) -> int:
        """Return T of a phase, 0 where it was not recorded."""
        return int(self.ids[phase].shape[1]) if phase in self.ids else 0

    def windows(self, phase: str, num_tokens: int) -> list[np.ndarray]:
        """Return the whole windows of `num_tokens` tokens of a phase, in order: [L, num_tokens, K] each."""
        count = self.num_tokens(phase) // num_tokens
        return [self.ids[phase][:, i * num_tokens : (i + 1) * num_tokens] for i in range(count)]

    def load(self, phase: str) -> np.ndarray:
        """Return how often each expert was chosen in a phase: [L, E] i64."""
        return expert_load(self.ids[phase], self.num_experts)


def save_trace(trace: RoutingTrace, path: Path) -> None:
    """Write a trace as .npz; ids take two bytes each where that is enough."""
    dtype = np.int16 if trace.num_experts <= np.iinfo(np.int16).max else np.int32
    arrays: dict[str, np.ndarray] = {phase: ids.astype(dtype) for phase, ids in trace.ids.items()}
    arrays[_HEADER] = np.array([_VERSION, trace.num_experts, trace.num_groups], np.int64)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, version=(1, 0), allow_pickle=False)


def load_trace(path: Path) -> RoutingTrace:
    """Read what `save_trace` wrote; a file from a stranger does no harm.

    Raises:
        ValueError: not such a file, or one whose arrays are too large, of a wrong kind or of ids out of range.
    """
    arrays = _read_arrays(path)
    header = arrays.pop(_HEADER)
    if header.shape != (3,) or header[0] != _VERSION:
        raise ValueError(f"trace {str(path)!r} has an unknown header; record it again with this version")
    try:
        return RoutingTrace(
            num_experts=int(header[1]),
            num_groups=int(header[2]),
            ids={phase: arrays[phase].astype(np.int32) for phase in PHASES if phase in arrays},
        )
    except ValueError as error:
        raise ValueError(f"trace {str(path)!r}: {error}") from error


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file, once their kinds and sizes are known to be harmless."""
    where = f"trace {str(path)!r}"
    try:
        with zipfile.ZipFile(path) as archive:
            entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
            if _HEADER not in entries or set(entries) - {_HEADER, *PHASES}:
                raise ValueError(f"it must hold {_HEADER} and phases, not {', '.join(sorted(entries)) or 'nothing'}")
            total = sum(entry.file_size for entry in entries.values())
            if total > MAX_BYTES:
                raise ValueError(f"it holds {total:,} bytes; use at most {MAX_BYTES:,}")
            return {name: _read_array(archive, entry) for name, entry in entries.items()}
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise ValueError(f"{where} is not an .npz file; record one with save_trace ({error})") from error
    except ValueError as error:
        raise ValueError(f"{where} cannot be read: {error}") from error


def _read_array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(entry) as file:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError(f"{entry.filename} has an unknown format")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        wanted = _HEADER_KINDS if entry.filename.startswith(_HEADER) else _ID_KINDS
        if dtype not in wanted:
            raise ValueError(f"{entry.filename} must be {' or '.join(map(str, wanted))}, got {dtype}")
        # numpy allocates what the header says before it reads: that must be what the file has.
        if math.prod(shape) * dtype.itemsize > entry.file_size:
            raise ValueError(f"{entry.filename} says {shape}, but has {entry.file_size:,} bytes")
    with archive.open(entry) as file:
        array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
        return array
