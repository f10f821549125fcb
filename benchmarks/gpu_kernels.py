"""What do the GPU kernels compile to? Compiles what changed for every published model and target; needs no GPU.

Writes tests/gpu/compiled.json, which tests hold against rules, and docs/gpu-kernels.md. `--all` compiles everything.
Units: registers of a thread, bytes of shared memory of a program.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.pop("TRITON_INTERPRET", None)

from rich.progress import track

from moewe.models.kernels.roofline import attention_rows, norm_work, rows_work
from moewe.models.published import published_config
from moewe.moe.kernels.roofline import layer_work
from moewe.native.gpu import TARGETS
from moewe.native.gpu.compiling import compile_launch, source_hash
from moewe.quant import FORMATS, KV_FORMATS
from moewe.runtime.gpu_launches import MODELS, moe_shapes
from moewe.runtime.ranks.kernels.roofline import sampling_work
from moewe.topologies.planner.hardware import load_hardware
from tests.support.compiled import RECORD, Case, Entry, all_cases, broken_rules, facts, read_record, stale

MACHINE = load_hardware("h200")
FLOOR_TOKENS = (1, 16, 256, 8192)  # of the table of least times of a layer
SEQUENCES, CONTEXT, PROMPT = 32, 8192, 4096  # of the table of least times of attention
PAGE = RECORD.parents[2] / "docs" / "gpu-kernels.md"


def entry_of(key: str) -> tuple[str, Entry]:
    """Compile one launch."""
    case = all_cases()[key]
    return key, {
        **facts(case),
        "source": source_hash(case.launch.kernel),
        **asdict(compile_launch(case.launch, case.target)),
    }


def compiled(keys: list[str], processes: int) -> Iterator[tuple[str, Entry]]:
    """Compile in parallel; what comes is in the order of `keys`."""
    if processes == 1:
        yield from map(entry_of, keys)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(entry_of, keys)


def write(record: dict[str, Entry], cases: dict[str, Case]) -> None:
    """Write the record, an entry a line, without what no model needs any more, and the page."""
    record = {key: {**facts(cases[key]), **entry} for key, entry in record.items() if key in cases}
    order = sorted((e["kernel"], e["target"], key) for key, e in record.items())
    lines = [f"{json.dumps(key)}: {json.dumps(record[key])}" for _, _, key in order]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    PAGE.write_text(page([record[key] for _, _, key in order], [cases[key] for _, _, key in order]))


def page(entries: list[Entry], cases: list[Case]) -> str:
    """Return docs/gpu-kernels.md."""
    kernels: dict[str, list[tuple[Entry, Case]]] = {}
    for entry, case in zip(entries, cases):
        kernels.setdefault(entry["kernel"], []).append((entry, case))
    spilled = max(entry["stack_bytes"] for entry in entries)
    return "\n".join(
        [
            "# What the GPU kernels compile to",
            "",
            "Made by `make cubins`; [gpu.md](gpu.md#how-to-read-the-table) says how to read it.",
            f"{len(entries)} machine codes, {spilled} bytes of spilled registers at most.",
            "",
            *(line for name, codes in kernels.items() for line in kernel_table(name, codes)),
            "## The least time of a layer",
            "",
            f"From bytes and products alone (`moe/kernels/roofline.py`), on {MACHINE.name} by its data sheet,",
            "all experts on one GPU, chosen alike; microseconds. Launches and latencies come on top.",
            "",
            "| model | experts | tokens | route | permute | experts | combine | experts are bound by |",
            "|---|---|---|---|---|---|---|---|",
            *floors(),
            "",
            "## The least time of attention",
            "",
            f"From [bytes and products](gpu.md#the-least-that-a-kernel-takes) alone, on {MACHINE.name}, one layer,",
            "all heads on one GPU; microseconds. *decode*: 32 sequences of 8,192 tokens; *prompt*: 4,096 tokens;",
            "*rows*: norm of heads, rotation, KV write of 4,096 rows; *norm*: with residual; *draw*: 32 rows.",
            "",
            "| model | attends to | KV | decode | prompt | rows | norm | draw |",
            "|---|---|---|---|---|---|---|---|",
            *attention_floors(),
            "",
        ]
    )


def kernel_table(name: str, codes: list[tuple[Entry, Case]]) -> Iterator[str]:
    """Yield the section of a kernel: a row a form, a column a target; codes that differ in alignment alone are one."""
    constants = [{**entry["constants"], "dtype": entry["dtype"], "warps": entry["warps"]} for entry, _ in codes]
    for each in constants:
        each.pop("FP8_BYTES", None)  # which the target decides
    always = {key: value for key, value in constants[0].items() if all(each.get(key) == value for each in constants)}
    forms: dict[str, list[tuple[Entry, Case]]] = {}
    for each, code in zip(constants, codes):
        form = ", ".join(_said(key, value) for key, value in each.items() if key not in always and _said(key, value))
        forms.setdefault(form or "the only one", []).append(code)
    common = ", ".join(_said(key, value) or f"not {key}" for key, value in always.items() if key != "dtype")
    yield from (f"## {name}", "", f"{len(codes)} codes, all with {common}.")
    yield from ("", "| form | sm_80 | sm_90 | sm_100 | models |", "|---|---|---|---|---|")
    for form, alike in sorted(forms.items(), key=lambda item: _in_order(item[0])):
        cells = (_cell([entry for entry, _ in alike if entry["target"] == target.name]) for target in TARGETS.values())
        models = {model for _, case in alike for model in case.models}
        yield f"| {form} | {' | '.join(cells)} | {len(models)} |"
    yield ""


def _said(name: str, value: object) -> str:
    """Return a constant as the table has it; what is not so, and what is usual, is not said."""
    if value is False or (name, value) == ("dtype", "bfloat16"):
        return ""
    return name if value is True else f"{name}={value}"


def _in_order(form: str) -> list[tuple[int, str]]:
    """Return a key that puts numbers in a form in their order."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", form)]


def _cell(entries: list[Entry]) -> str:
    """Return what a form is on a target: of several codes the most registers, and the fewest wide loads."""
    if not entries:
        return ""
    most = max(entries, key=lambda entry: (entry["stack_bytes"], entry["registers"]))
    parts = [f"{most['registers']} regs"]
    shared = max(entry["shared_bytes"] for entry in entries)
    parts += [f"{shared / 1024:.0f} KiB"] if shared >= 1024 else []
    products = {name.split(".")[0] for entry in entries for name in entry["by_name"] if "MMA" in name}
    if products:
        parts += [f"{most['stages']} st", f"{min(entry['tensor'] for entry in entries)} {'/'.join(sorted(products))}"]
    least = min(entries, key=lambda entry: entry["wide_loads"] / max(1, entry["loads"]))
    parts.append(f"{least['wide_loads']}/{least['loads']} wide")
    if most["stack_bytes"]:
        parts.append(f"{most['stack_bytes']} spilled")
    return ", ".join(parts)


def floors() -> Iterator[str]:
    """Yield rows of the table of least times."""
    for model, formats in MODELS.items():
        shapes = moe_shapes(published_config(model), formats)
        for name in formats:
            for num_tokens in FLOOR_TOKENS:
                work = layer_work(shapes, num_tokens, name)
                times = " | ".join(f"{work[part].seconds(MACHINE) * 1e6:.2g}" for part in work)
                bound = "memory" if work["experts"].is_bound_by_memory(MACHINE) else "products"
                yield f"| {model} | {name} | {num_tokens} | {times} | {bound} |"


def attention_floors() -> Iterator[str]:
    """Yield rows of the table of least times of attention."""
    for model in MODELS:
        config = published_config(model)
        norm = norm_work(PROMPT, config.hidden_size, adds=True)
        draw = sampling_work(SEQUENCES, config.vocab_size)["draw"]
        for name, held in (("bf16", FORMATS["bfloat16"]), ("fp8", KV_FORMATS["fp8"])):
            for rows in attention_rows(config, held):
                works = (rows.decode(SEQUENCES, CONTEXT), rows.work([(0, PROMPT)]), rows_work(config, rows, PROMPT))
                times = " | ".join(f"{work.seconds(MACHINE) * 1e6:.2g}" for work in (*works, norm, draw))
                yield f"| {model} | {rows.group.name} | {name} | {times} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="compile what did not change, too")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    record, cases = read_record(), all_cases()
    keys = list(cases) if args.all else stale(record)
    try:
        for key, entry in track(compiled(keys, args.processes), total=len(keys), description="compiling"):
            record[key] = entry
    finally:  # what is done need not be done again
        write(record, cases)
    broken = [(record[key], what) for key in cases for what in broken_rules(record[key])]
    for entry, what in broken:
        print(f"{entry['kernel']} {entry['target']} {entry['constants']}: {what}")
    print(f"{len(keys)} compiled, {len(cases)} in all, {len(broken)} against the rules")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
