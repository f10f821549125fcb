"""The machine code of kernels for real GPUs: as recorded, by rules; a sample compiled anew, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest
import torch

from moewe.models.kernels.launches import layer_launches
from moewe.models.kernels.projections import stored_launches
from moewe.models.published import published_config
from moewe.moe.kernels.expert_tiles import ProductConfig, ProductSize, pick_config
from moewe.moe.kernels.experts import ffn_products
from moewe.moe.kernels.launches import PLAIN, choice_launches
from moewe.moe.kernels.permute import permute_launches
from moewe.moe.kernels.weights import Weights, kernel_weights
from moewe.native.gpu import TARGETS, GpuKernels
from moewe.native.gpu.compiling import source_files
from moewe.runtime.gpu_launches import EXPERTS_ALONE, MODELS, moe_shapes
from tests.support.compiled import RECORD, RULES, Case, Entry, all_cases, broken_rules, read_record, stale

ROOT = RECORD.parents[2]
# Rows of experts, up to those of 8,192 tokens on each of 8 ranks: all small numbers, larger ones in steps of a fifth.
ROWS = sorted({*range(1, 34), *(int(1.2**step) for step in range(20, 73))})


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


def test_every_choice_of_tiles_for_experts_is_recorded() -> None:
    """Of steps of any size, on ranks with any number of slots: swept, not taken from where launches.py looks."""
    entries = [entry for entry in read_record().values() if entry["kernel"] in ("streamed_kernel", "persistent_kernel")]
    recorded = {tiles_key(entry, entry["target"]) for entry in entries}
    for target, name in product(TARGETS.values(), MODELS):
        shapes = moe_shapes(published_config(name), MODELS[name])
        for format_name in MODELS[name]:
            experts = shapes.experts(format_name)
            parts = [kernel_weights(w, target, gated=gated) for w, gated in ((experts.w13, True), (experts.w2, False))]
            for size, part in zip(ffn_products(experts, target), parts):
                for slots, fixed in product({1, 3, 7, size.slots // 8, size.slots}, (False, True)):
                    chosen = {pick_config(replace(size, rows=rows, slots=slots), target, batch_invariant=fixed)
                              for rows in ROWS}  # fmt: skip
                    keys = {tiles_key(entry_like(size, part, config), target.name) for config in chosen}
                    assert keys <= recorded, (name, format_name, slots, keys - recorded)


def entry_like(size: ProductSize, part: Weights, config: ProductConfig) -> Entry:
    """Return what `tiles_key` reads of an entry."""
    constants = {
        "GATED": size.gated, "FORMAT": part.format, "SCALE_ROWS": part.scale_rows, "SCALE_COLUMNS": part.scale_columns,
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
    }  # fmt: skip
    kernel = "persistent_kernel" if config.persistent else "streamed_kernel"
    return {"kernel": kernel, "constants": constants, "warps": config.num_warps, "stages": config.num_stages}


def tiles_key(entry: Entry, target: str) -> tuple[object, ...]:
    names = ("GATED", "FORMAT", "SCALE_ROWS", "SCALE_COLUMNS", "BLOCK_M", "BLOCK_N", "BLOCK_K")
    return target, entry["kernel"], entry["warps"], entry["stages"], *(entry["constants"][name] for name in names)


def test_every_size_of_a_step_runs_what_is_recorded() -> None:
    """All that is not experts: rows of a step, choices of experts, and products of all rows with one matrix."""
    target, recorded = TARGETS[90], all_cases().keys()
    for name, formats in MODELS.items():
        config = published_config(name)
        shapes = moe_shapes(config, formats)
        bias = torch.empty(shapes.routing.num_experts, device="meta") if shapes.has_selection_bias else None
        launches = [*layer_launches(config, target, 4099)]
        launches += choice_launches(shapes.routing, bias, (3, 8, 15, 16, 17, 64, 65, 511, 4099))
        for rows in (2, 15, 16, 17, 32, 33, 64, 65, 127, 1024, 8192):
            for format_name in set(formats) - {PLAIN, EXPERTS_ALONE}:
                launches += stored_launches(config, format_name, rows, GpuKernels(target=target))
            slot_ids = torch.empty(rows, shapes.routing.top_k, dtype=torch.int32, device="meta")
            launches += permute_launches(slot_ids, shapes.routing.num_experts // 3)[0]
        missing = [launch for launch in launches if Case(launch=launch, target=target, models=()).key not in recorded]
        assert not missing, (name, missing[0].name, missing[0].constants)


def test_rules_find_what_is_wrong() -> None:
    sound = {"kernel": "combine_kernel", "target": "sm_80", "stack_bytes": 0, "shared_bytes": 0, "tensor": 0,
             "wide_loads": 9, "fused": 0}  # fmt: skip
    for dtype, problems in (("bfloat16", 1), ("float32", 0)):
        assert len(list(broken_rules({**sound, "kernel": "streamed_kernel", "dtype": dtype}))) == problems
    assert not list(broken_rules(sound))
    for name, value in [("stack_bytes", 8), ("shared_bytes", 1 << 20), ("wide_loads", 0), ("fused", 1)]:
        assert len(list(broken_rules({**sound, name: value}))) == 1


def test_a_hash_covers_the_kernels_that_a_kernel_calls() -> None:
    """Of experts: how weights are decoded and rounded; of the norm in models/, the sum in moe/."""
    kernels = {case.launch.name: case.launch.kernel for case in all_cases().values()}
    for name, called in [
        ("streamed_kernel", {"experts_triton.py", "weights_triton.py", "numbers_triton.py"}),
        ("norm_kernel", {"norm_triton.py", "combine_triton.py", "numbers_triton.py"}),
        ("count_kernel", {"permute_triton.py", "row_tiles_triton.py"}),
    ]:
        assert {path.name for path in source_files(kernels[name])} == called


@pytest.mark.parametrize("package", ["moe", "attention", "models", "runtime/ranks"])
def test_every_operation_has_launches_and_a_test(package: str) -> None:
    """`<op>_triton.py` stands beside `<op>.py`, which has a test; what is used by other bodies alone has neither."""
    folder = ROOT / package / "kernels"
    bodies = {path.name.removesuffix("_triton.py") for path in folder.glob("*_triton.py")}
    helpers = {op for op in bodies for path in folder.glob("*_triton.py") if f"from .{op}_triton" in path.read_text()}
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    assert bodies > helpers
    for operation in sorted(bodies - helpers):
        assert (folder / f"{operation}.py").exists(), operation
        assert f"from moewe.{package.replace('/', '.')}.kernels.{operation} import" in tests, operation


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
