"""torch.cuda without a GPU: its functions and classes with their real signatures, doing nothing, and tensors on a CPU.

Whatever torch does not have, or is called with arguments that it does not take, fails. Not CUDA graphs that are
replayed (recorded_graphs.py): a capture runs what it is given, and a replay does nothing.
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from torch.overrides import TorchFunctionMode

_FUNCTIONS = ("synchronize", "empty_cache", "current_stream", "stream")
_CARD = {
    "name": "fake", "major": 9, "minor": 0, "multi_processor_count": 132, "total_memory": 141 << 30,
    "L2_cache_size": 1 << 10, "uuid": "0-1", "shared_memory_per_block": 48 << 10,
}  # fmt: skip


class _OnCpu(TorchFunctionMode):
    """Lets what is asked for on a GPU be made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def moved(value: Any) -> Any:
            is_gpu = isinstance(value, str | torch.device) and str(value).startswith("cuda")
            return torch.device("cpu") if is_gpu else value

        kwargs = {name: moved(value) for name, value in (kwargs or {}).items()}
        if getattr(func, "__name__", "") == "to":
            args = tuple(map(moved, args))
        return func(*args, **kwargs)


def _property_names() -> set[str]:
    """Return what torch says that it knows of a card."""
    text = Path(torch.__file__).with_name("_C").joinpath("__init__.pyi").read_text()
    found = re.search(r"^class _CudaDeviceProperties:\n((?:    .*\n|\n)+)", text, re.MULTILINE)
    assert found is not None
    return set(re.findall(r"^    (\w+):", found[1], re.MULTILINE))


def _class(real: Any, constructor: str, **does: Any) -> Any:
    """Return what makes instances like those of `real`, whose methods named in `does` return what these do."""
    signature = inspect.signature(getattr(real, constructor))

    def make(*args: Any, **kwargs: Any) -> Any:
        signature.bind(real, *args, **kwargs)
        made = create_autospec(real, instance=True)
        for name, method in does.items():
            getattr(made, name).side_effect = method
        return made

    return make


@contextmanager
def fake_cuda(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let code that asks for a GPU run on the CPU; an event takes a millisecond."""
    assert set(_CARD) <= _property_names()
    card = SimpleNamespace(**_CARD)
    cuda = torch.cuda
    properties = create_autospec(cuda.get_device_properties, return_value=card)
    name = create_autospec(cuda.get_device_name, return_value=card.name)
    mocks = {one: create_autospec(getattr(cuda, one)) for one in _FUNCTIONS}
    mocks |= {
        "get_device_properties": properties,
        "get_device_name": name,
        "is_available": create_autospec(cuda.is_available, return_value=True),
        "graph": create_autospec(cuda.graph),
        "Event": _class(cuda.Event, "__new__", elapsed_time=lambda end: 1.0),
        "Stream": _class(cuda.Stream, "__new__"),
        "CUDAGraph": _class(cuda.CUDAGraph, "__new__", replay=lambda: time.sleep(0)),
    }
    with patch.context() as inner, _OnCpu():
        for one, mock in mocks.items():
            inner.setattr(cuda, one, mock)
        yield
