"""What Triton's compiler is told of a launch: types, constants and which numbers are multiples of 16.

It mirrors what a launch on a GPU would find in its arguments, which may be tensors without memory (device `meta`).
Not a compiler (compiling.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .launch import Constant, Launch

ALIGNMENT = 16
_TYPES = {
    "float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8e4nv",
    "int64": "i64", "int32": "i32", "int16": "i16", "int8": "i8", "uint8": "u8", "bool": "i1",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Signature:
    """How a kernel is specialised.

    Attributes:
        types: by parameter, in order; `constexpr` for those in `constants`.
        constants: by parameter; besides those of the launch, arguments that are None or 1.
        aligned: parameters that are multiples of 16: pointers in bytes, whole numbers as they are.
    """

    types: dict[str, str]
    constants: dict[str, Constant]
    aligned: tuple[str, ...]

    def __str__(self) -> str:
        """One line, the same for the same machine code."""
        marks = {name: "/16" for name in self.aligned}
        return " ".join(
            f"{name}={self.constants[name]}" if name in self.constants else f"{name}:{kind}{marks.get(name, '')}"
            for name, kind in self.types.items()
        )


def signature_of(launch: Launch) -> Signature:
    """Return how `launch` specialises its kernel."""
    fixed = not_specialised(launch.kernel)
    types: dict[str, str] = {}
    constants: dict[str, Constant] = dict(launch.constants)
    aligned = []
    for name in launch.kernel.arg_names:
        if name in launch.constants:
            types[name] = "constexpr"
            continue
        value = launch.arguments[name]
        if value is None or (isinstance(value, int) and value == 1 and name not in fixed):
            types[name], constants[name] = "constexpr", value
            continue
        types[name] = _type_of(value)
        address = value.data_ptr() if hasattr(value, "data_ptr") else value
        if isinstance(address, int) and address % ALIGNMENT == 0 and name not in fixed:
            aligned.append(name)
    return Signature(types=types, constants=constants, aligned=tuple(aligned))


def _type_of(value: Any) -> str:
    if hasattr(value, "data_ptr"):
        return "*" + _TYPES[str(value.dtype).removeprefix("torch.")]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"


def not_specialised(kernel: Any) -> Iterable[str]:
    """Return the names that `triton.jit(do_not_specialize=...)` was given, of a kernel that is interpreted or not."""
    names = kernel.kwargs.get("do_not_specialize") if hasattr(kernel, "kwargs") else kernel.do_not_specialize
    return names or ()
