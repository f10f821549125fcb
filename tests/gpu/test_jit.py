"""What Triton's JIT makes of a launch on a GPU is what was compiled ahead: for every launch in the record.

That is asked in a process of its own, whose kernels are not interpreted, with a driver that is not there. Its JIT
takes arguments apart as on a GPU and is stopped before it compiles.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from moewe.models.kernels.launches import layer_launches
from moewe.models.published import published_config
from moewe.moe.kernels.launches import moe_launches
from moewe.native.gpu import TARGETS
from moewe.native.gpu.signature import not_specialised
from moewe.runtime.gpu_launches import moe_shapes
from tests.support.compiled import RECORD

ROOT = RECORD.parents[2]


def differences() -> dict[str, Any]:
    """Launch all cases; return how many there were, and of each kernel what the JIT saw otherwise."""
    import torch
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.driver import driver

    from moewe.native.gpu.compiling import source_of
    from tests.support.compiled import all_cases

    cases = list(all_cases().values())
    capabilities = sorted({case.target.capability for case in cases})  # a device for each: the JIT asks but once
    now = SimpleNamespace(device=0)
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", capabilities[now.device], 32),
            get_current_device=lambda: now.device,
            get_current_stream=lambda device: 0,
            get_active_torch_device=lambda: torch.device("cuda", now.device),
        )
    )
    seen: list[dict[str, Any]] = []

    def stop(*, compile: dict[str, Any], **_: Any) -> bool:
        seen.append(compile)
        return True

    knobs.runtime.jit_cache_hook = stop
    found: dict[str, str] = {}
    for case in cases:
        now.device = capabilities.index(case.target.capability)
        seen.clear()
        case.launch.run()
        (asked,) = seen  # once: neither a hit of another form nor silence
        (attributes,) = asked["configs"]
        kernel, target = case.launch.kernel, GPUTarget("cuda", case.target.capability, 32)
        source = ASTSource(kernel, asked["signature"], asked["constants"], {k: v for k, v in attributes.items() if v})
        ahead = source_of(case.launch)
        for name in ("signature", "constants", "attrs"):
            theirs, ours = getattr(source, name), getattr(ahead, name)
            if theirs != ours:
                found.setdefault(f"{case.launch.name} {name}", f"JIT {theirs}, ahead {ours}")
        options = make_backend(target).parse_options(case.launch.options)
        for name in ("num_warps", "num_stages", "num_ctas", "enable_fp_fusion", "launch_cooperative_grid"):
            if asked[name] != getattr(options, name):
                found.setdefault(f"{case.launch.name} {name}", f"JIT {asked[name]}, ahead {getattr(options, name)}")
    return {"cases": len(cases), "differences": found}


def test_no_number_that_follows_the_rows_of_a_step_asks_for_other_machine_code() -> None:
    """Triton makes another form of a kernel for a 1 and for multiples of 16, unless it is told not to."""
    config = published_config("deepseek-v3")
    shapes = moe_shapes(config, ("fp8 128x128",))
    seen: dict[str, set[tuple[int, ...]]] = {}
    for num_rows in (1, 2, 15, 16, 17, 64, 1000, 4096):
        found: dict[str, set[tuple[int, ...]]] = {}
        for launch in (
            *moe_launches(shapes, TARGETS[90], [num_rows]), *layer_launches(config, TARGETS[90], num_rows)
        ):  # fmt: skip
            fixed = not_specialised(launch.kernel)
            numbers = tuple(v for name, v in launch.arguments.items() if isinstance(v, int) and name not in fixed)
            found.setdefault(launch.name, set()).add(numbers)
        for name, numbers in found.items():
            assert seen.setdefault(name, numbers) == numbers, f"{name} at {num_rows} rows"
    assert len(seen) > 10


@pytest.mark.slow
def test_the_jit_compiles_what_was_compiled_ahead() -> None:
    code = "import json; from tests.gpu.test_jit import differences; print(json.dumps(differences()))"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert not told["differences"]
    assert told["cases"] == len(json.loads(RECORD.read_text()))
