"""Triton's driver of GPUs, started before anything waits for it.

Not a launch (launch.py). Triton compiles a part of its driver with a C compiler when it is first used; 3.6 also a
launcher for each form of a kernel.
"""

from __future__ import annotations


def start_driver() -> None:
    """Let Triton make what it launches kernels by.

    Raises:
        ValueError: it cannot; one line with the reason and what is needed.
    """
    from triton.runtime import driver

    try:
        driver.active.get_current_target()
    except Exception as error:  # of a compiler, of a linker, of the driver
        text = str(error).strip()
        reason = text.splitlines()[0] if text else type(error).__name__
        raise ValueError(
            f"Triton cannot launch kernels on this GPU: {reason}; it needs a C compiler (gcc), the headers of Python "
            "(python3-dev) and libcuda.so.1"
        ) from error
