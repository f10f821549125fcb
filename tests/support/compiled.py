"""What kernels compiled to when their sources last changed, as committed, and the rules for it.

Not a compiler: benchmarks/gpu_kernels.py writes the record. Units: as in moewe.native.gpu.machine_code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from moewe.native.gpu import TARGETS, GpuTarget, Launch
from moewe.native.gpu.compiling import launch_key, source_hash
from moewe.runtime.gpu_launches import published_launches

RECORD = Path(__file__).resolve().parents[1] / "gpu" / "compiled.json"
Entry = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What the machine code of a kernel must be like.

    Attributes:
        tensor: it multiplies with tensor cores, unless it reads fp32: none of them takes all its bits.
        wide: it loads 16 bytes at once.
        fused: products and sums may be one instruction.
        stack_bytes: of a thread, at most.
    """

    tensor: bool = False
    wide: bool = True
    fused: bool = True
    stack_bytes: int = 0


RULES = {
    "combine_kernel": Rule(fused=False),
    "norm_kernel": Rule(fused=False),
    "heads_kernel": Rule(fused=False),
    "latent_rows_kernel": Rule(fused=False),
    "tiles_kernel": Rule(wide=False),
    "streamed_kernel": Rule(tensor=True),
    "persistent_kernel": Rule(tensor=True),
    "router_kernel": Rule(),
    "route_kernel": Rule(wide=False),
    "route_permute_kernel": Rule(wide=False),
    "count_kernel": Rule(wide=False),
    "place_kernel": Rule(wide=False),
    "decode_kernel": Rule(tensor=True),
    "combine_splits_kernel": Rule(),
    "prefill_kernel": Rule(tensor=True, fused=False),
    "scan_kernel": Rule(),
    "logprobs_kernel": Rule(),
    "draw_kernel": Rule(),
}
# They find scales of one-byte codes by a division, which is made of fused instructions and exact.
DIVIDING = ("heads_kernel", "latent_rows_kernel")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One launch for one target, with the models in which it occurs."""

    launch: Launch
    target: GpuTarget
    models: tuple[str, ...]

    @property
    def key(self) -> str:
        """Short name of what is compiled, but for the text of the kernel."""
        return hashlib.sha256(launch_key(self.launch, self.target).encode()).hexdigest()[:16]


@cache
def all_cases() -> dict[str, Case]:
    """Return every launch of the published models on every target, by key."""
    found: dict[str, Case] = {}
    models: dict[str, dict[str, None]] = {}
    for target in TARGETS.values():
        for model, launch in published_launches(target):
            case = Case(launch=launch, target=target, models=())
            key = case.key
            found.setdefault(key, case)
            models.setdefault(key, {})[model] = None
    return {key: replace(case, models=tuple(models[key])) for key, case in found.items()}


def facts(case: Case) -> Entry:
    """Return what of an entry is known before it is compiled; `dtype` is that of what a kernel reads first."""
    launch = case.launch
    tensors = (launch.arguments.get(name) for name in launch.kernel.arg_names)
    dtype = next(str(tensor.dtype) for tensor in tensors if isinstance(tensor, torch.Tensor))
    return {
        "kernel": launch.name, "target": case.target.name, "constants": dict(launch.constants),
        "warps": launch.num_warps, "stages": launch.num_stages, "dtype": dtype.removeprefix("torch."),
    }  # fmt: skip


def read_record() -> dict[str, Entry]:
    """Return what is committed, by key."""
    return {} if not RECORD.exists() else dict(json.loads(RECORD.read_text()))


def stale(record: dict[str, Entry]) -> list[str]:
    """Return the keys of launches that were not compiled since their kernel's source changed."""
    return [
        key
        for key, case in all_cases().items()
        if key not in record or record[key]["source"] != source_hash(case.launch.kernel)
    ]


def broken_rules(entry: Entry) -> Iterable[str]:
    """Yield what is wrong with a compiled kernel."""
    rule = RULES[entry["kernel"]]
    target = next(t for t in TARGETS.values() if t.name == entry["target"])
    if entry["stack_bytes"] > rule.stack_bytes:
        yield f"{entry['stack_bytes']} bytes of stack (registers were spilled), {rule.stack_bytes} allowed"
    if entry["shared_bytes"] > target.shared_bytes:
        yield f"{entry['shared_bytes']} bytes of shared memory, {target.name} has {target.shared_bytes}"
    if rule.tensor and entry["dtype"] != "float32" and not entry["tensor"]:
        yield "no tensor-core instruction"
    if rule.wide and not entry["wide_loads"]:
        yield "no load of 16 bytes"
    divides = entry["kernel"] in DIVIDING and entry["constants"]["FORMAT"] != "plain"
    if not rule.fused and entry["fused"] and not divides:
        yield f"{entry['fused']} products fused with sums, so bits differ"
