"""A launch of a Triton kernel as a record, so that the same object can be run, interpreted, compiled ahead and named.

Not a kernel and not a choice of tiles: packages make launches, `pick_config` of each operation chooses.
Imports no Triton: a kernel comes in as the object that `triton.jit` made of it.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# What a launch may hand to a kernel besides constants: tensors (anything with dtype and data_ptr) and numbers.
Argument = Any
Constant = int | float | bool | str | None

# Triton's interpreter changes the language for the whole process while a kernel runs.
_one_at_a_time = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch.

    Attributes:
        kernel: what `triton.jit` made.
        grid: programs along up to three axes; nothing runs where one of them is 0.
        arguments: by parameter: tensors, numbers, or None for what the kernel does not get.
        constants: the parameters that are `tl.constexpr`.
        num_warps, num_stages: of the compiler.
        fuses_products: whether a product and a sum may become one instruction, rounded once. Off where bits are
            promised.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Argument]
    constants: Mapping[str, Constant]
    num_warps: int = 4
    num_stages: int = 2
    fuses_products: bool = True

    @property
    def name(self) -> str:
        """The kernel's."""
        return str(self.kernel.__name__)

    @property
    def options(self) -> dict[str, int | bool]:
        """What the compiler is told besides types and constants."""
        return {
            "num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": self.fuses_products,
        }  # fmt: skip

    def run(self) -> None:
        """Start it on the device of its tensors; with an interpreted kernel, do it now."""
        if not math.prod(self.grid):
            return
        if interpreting():
            with _one_at_a_time:
                self._start()
        else:
            self._start()

    def _start(self) -> None:
        self.kernel[self.grid](**self.arguments, **self.constants, **self.options)


def interpreting() -> bool:
    """Return True where kernels run in Triton's interpreter (set in the environment before Triton is imported).

    Launches then widen what they multiply to fp32: the interpreter of Triton 3.9 multiplies bf16 as raw integers.
    """
    return os.environ.get("TRITON_INTERPRET") == "1"
