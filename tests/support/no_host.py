"""Fails where a forward pass would make the host wait for a GPU, on a machine that has none.

What reads a tensor from Python is refused, and operations whose shapes depend on numbers. Launches of kernels are left
alone: the interpreter, which runs them here, reads its arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moewe.native.gpu import Launch

_READING = ("cpu", "item", "numpy", "tolist", "__bool__", "__int__", "__float__", "__index__")
_WAITING = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
)


class HostWaits(AssertionError):
    """Something would wait for the device."""


class _NoShapesFromNumbers(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name == "index" and any(t is not None and t.dtype == torch.bool for t in args[1])
        if name in _WAITING or by_mask:
            raise HostWaits(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_looks() -> Iterator[None]:
    """Raise `HostWaits` where the host would look at numbers of a device, launches aside."""
    run, launching = Launch.run, [False]

    def running(launch: Launch) -> None:
        launching[0] = True
        try:
            with torch.utils._python_dispatch._disable_current_modes():
                run(launch)
        finally:
            launching[0] = False

    def refusing(name: str) -> Any:
        method = getattr(torch.Tensor, name)

        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not launching[0]:
                raise HostWaits(f"Tensor.{name} waits for the device")
            return method(self, *args, **kwargs)

        return patch.object(torch.Tensor, name, read)

    patches = [patch.object(Launch, "run", running), *map(refusing, _READING)]
    for each in patches:
        each.start()
    try:
        with _NoShapesFromNumbers():
            yield
    finally:
        for each in reversed(patches):
            each.stop()
