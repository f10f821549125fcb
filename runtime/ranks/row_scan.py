"""The best place of rows of logits, and which rows hold only finite numbers: in one launch on a GPU, natively on a CPU
that has kernels, else with torch.

Not sampling (sampler.py). Shapes: N rows, V numbers a row.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from ...native.library import load
from .host_memory import Fetcher
from .own_gpu import runs_kernels

_NATIVE_DTYPES = (torch.float32, torch.bfloat16)


class _ScanArgs(ctypes.Structure):
    """`struct ScanRows` of native/csrc/rows.h."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("best", ctypes.c_void_p),
        ("finite", ctypes.c_void_p),
        ("is_bf16", ctypes.c_int32),
    )


def best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """Return where the largest number of each row of [N, V] stands, the first of equal ones: [N] i64. V > 0."""
    if on_gpu(logits):
        return _scan_on_gpu(logits)[0]
    if not _is_native(logits):
        return logits.argmax(-1)
    best = torch.empty(logits.shape[0], dtype=torch.int64)
    _scan(logits, best=best)
    return best


def finite_rows(values: torch.Tensor) -> torch.Tensor:
    """Return which rows of [N, V] hold only finite numbers, [N] bool."""
    if on_gpu(values):
        return _scan_on_gpu(values)[1]
    if not _is_native(values):
        return torch.isfinite(values).all(-1)
    finite = torch.empty(values.shape[0], dtype=torch.bool)
    _scan(values, finite=finite)
    return finite


def on_gpu(values: torch.Tensor) -> bool:
    """Tell whether Triton's kernels take these rows."""
    return values.is_cuda and values.shape[1] > 0 and runs_kernels(values.device)


def _scan_on_gpu(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from .kernels.rows import triton_scan

    return triton_scan(values.contiguous())


def _is_native(values: torch.Tensor) -> bool:
    is_plain = values.device.type == "cpu" and values.dtype in _NATIVE_DTYPES and values.is_contiguous()
    return is_plain and values.shape[1] > 0 and load() is not None


def _scan(values: torch.Tensor, *, best: torch.Tensor | None = None, finite: torch.Tensor | None = None) -> None:
    library = load()
    assert library is not None
    args = _ScanArgs(
        values=values.data_ptr(),
        rows=values.shape[0],
        width=values.shape[1],
        best=None if best is None else best.data_ptr(),
        finite=None if finite is None else finite.data_ptr(),
        is_bf16=values.dtype == torch.bfloat16,
    )
    library.moewe_scan_rows(ctypes.byref(args))


def scan_on_device(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `best_tokens` and `finite_rows` of [N, V] where the rows lie; the host waits for nothing."""
    return _scan_on_gpu(values) if on_gpu(values) else (values.argmax(-1), torch.isfinite(values).all(-1))


class RowScanner:
    """Both answers in one look, step after step: they stand in arrays that the next call writes again."""

    def __init__(self) -> None:
        self._best, self._finite = np.empty(0, np.int64), np.empty(0, np.bool_)
        self._args = _ScanArgs()

    def __call__(self, values: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return `best_tokens` [N] i64 and `finite_rows` [N] bool of `values` [N, V], V > 0."""
        if not _is_native(values):
            best, finite = scan_on_device(values)
            return best.numpy(), finite.numpy()
        args, (num, width) = self._args, values.shape
        if num != len(self._best):
            self._best, self._finite = np.empty(num, np.int64), np.empty(num, np.bool_)
            args.rows, args.best, args.finite = num, self._best.ctypes.data, self._finite.ctypes.data
        args.values, args.width, args.is_bf16 = values.data_ptr(), width, values.dtype == torch.bfloat16
        library = load()
        assert library is not None
        library.moewe_scan_rows(ctypes.byref(args))
        return self._best, self._finite


class StepScanner:
    """Looks at the logits of a step and at its hidden rows; the answers hold until the next call.

    On a GPU nobody waits for a look, so that what is done with its answers there is launched at once; `fetch` waits.

    Args:
        device: of the rows.
    """

    def __init__(self, device: torch.device) -> None:
        self._logits, self._hidden, self._fetch = RowScanner(), RowScanner(), Fetcher(device)
        self._on_host = device.type == "cpu"

    def look(self, logits: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return `best_tokens` and `finite_rows` of `logits` [K, V], and `finite_rows` of `hidden` [T, D]."""
        if self._on_host:
            best, finite = self._logits(logits)
            return torch.from_numpy(best), torch.from_numpy(finite), torch.from_numpy(self._hidden(hidden)[1])
        return *scan_on_device(logits), scan_on_device(hidden)[1]

    def fetch(
        self, tokens: torch.Tensor, finite: torch.Tensor, well: torch.Tensor
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Bring tokens and verdicts to the host, with one wait."""
        first, second, third = self._fetch(tokens, finite, well)
        return first, second, third
