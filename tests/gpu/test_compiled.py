"""The machine code of kernels for real GPUs: as recorded, by rules; a sample compiled anew, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from moewe.native.gpu.compiling import source_hash
from tests.support.compiled import RECORD, RULES, all_cases, broken_rules, read_record, stale

ROOT = RECORD.parents[2]


def test_everything_was_compiled_since_its_source_changed() -> None:
    assert not stale(read_record()), "kernels or their choices of tiles changed: run `make cubins`"


def test_what_is_recorded_keeps_the_rules() -> None:
    record = read_record()
    assert {entry["kernel"] for entry in record.values()} == set(RULES)
    assert not [f"{e['kernel']} {e['target']}: {what}" for e in record.values() for what in broken_rules(e)]


def test_every_target_and_nothing_else_is_recorded() -> None:
    record = read_record()
    assert record.keys() == all_cases().keys()
    assert {entry["target"] for entry in record.values()} == {"sm_80", "sm_90", "sm_100"}


def test_rules_find_what_is_wrong() -> None:
    sound = {"kernel": "combine_kernel", "target": "sm_80", "stack_bytes": 0, "shared_bytes": 0, "tensor": 0,
             "wide_loads": 9, "fused": 0}  # fmt: skip
    assert not list(broken_rules(sound))
    for name, value in [("stack_bytes", 8), ("shared_bytes", 1 << 20), ("wide_loads", 0), ("fused", 1)]:
        assert len(list(broken_rules({**sound, name: value}))) == 1


def test_a_hash_covers_the_kernels_that_a_kernel_calls() -> None:
    kernels = {case.launch.name: case.launch.kernel for case in all_cases().values()}
    assert len({source_hash(kernel) for kernel in kernels.values()}) >= 1
    from moewe.native.gpu import numbers_triton

    assert source_hash(kernels["combine_kernel"]) != source_hash(numbers_triton.rounded)


@pytest.mark.parametrize("package", ["moe", "attention", "models"])
def test_every_operation_has_launches_and_a_test(package: str) -> None:
    """`<op>_triton.py` stands beside `<op>.py`, which has a test; what is used by other bodies alone has neither."""
    folder = ROOT / package / "kernels"
    bodies = {path.name.removesuffix("_triton.py") for path in folder.glob("*_triton.py")}
    helpers = {op for op in bodies for path in folder.glob("*_triton.py") if f"from .{op}_triton" in path.read_text()}
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    assert bodies > helpers
    for operation in sorted(bodies - helpers):
        assert (folder / f"{operation}.py").exists(), operation
        assert f"from moewe.{package}.kernels.{operation} import" in tests, operation


@pytest.mark.slow
def test_a_sample_compiles_to_what_is_recorded() -> None:
    """One launch of each kernel, for a target that depends on its source; any version of Triton keeps the rules."""
    record = read_record()
    chosen: dict[str, str] = {}
    for key in sorted(record, key=lambda key: key + record[key]["source"]):
        chosen.setdefault(record[key]["kernel"], key)
    code = (
        "import json, sys; from benchmarks.gpu_kernels import entry_of;"
        "print(json.dumps([entry_of(key) for key in sys.argv[1:]]))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code, *chosen.values()], cwd=ROOT, env=environment, check=True, capture_output=True,
        text=True,
    )  # fmt: skip
    for key, entry in json.loads(done.stdout):
        assert not list(broken_rules(entry)), entry
        assert {name: entry[name] for name in ("kernel", "target", "source")} == {
            name: record[key][name] for name in ("kernel", "target", "source")
        }


@pytest.mark.slow
def test_products_in_fp32_spill_no_register() -> None:
    """They are in no published model's launches; `--batch-invariant` takes them for routers."""
    code = (
        "import json, torch;"
        "from moewe.moe.kernels.linear import linear_launches;"
        "from moewe.native.gpu import TARGETS, GpuKernels;"
        "from moewe.native.gpu.compiling import compile_launch;"
        "x, router = (torch.empty(rows, 4096, device='meta') for rows in (16, 128));"
        "kernels = {target: GpuKernels(target=target, batch_invariant=True) for target in TARGETS.values()};"
        "made = {t: compile_launch(linear_launches(x, router, None, kernels[t])[0][-1], t) for t in kernels};"
        "print(json.dumps({target.name: code.stack_bytes for target, code in made.items()}))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    )
    assert json.loads(done.stdout) == {"sm_80": 0, "sm_90": 0, "sm_100": 0}
