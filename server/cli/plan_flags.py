"""The flags of `moewe plan`.

Not what it does with them (server/plan/inputs.py). Units: as the help text of each flag says.
"""

from __future__ import annotations

from typing import Any

from ..flags.table import TOOL, Flag

WHAT, LOAD, SEARCH, MEMORY, OUTPUT = "What to plan", "Load", "Search", "Memory", "Output"


def _flag(name: str, kind: str, panel: str, help: str, **more: Any) -> Flag:
    return Flag(name=name, group=TOOL, kind=kind, panel=panel, help=help, **more)


PLAN_FLAGS = (
    _flag("model", "text", WHAT, "The model, instead of the argument (or in --config)."),
    _flag("topology", "text", WHAT, "EPxDPy, `prefill: EP4DP16 | decode: EP64DP3`, a .yaml file, or a preset.",
          default="EP1DP1"),
    _flag("hardware", "text", WHAT, "a100, h100, h200, h800, h20, b200, b300, gb200-nvl72, gb300-nvl72, vr-nvl72, "
          "mi300x; local measures this host; or a .yaml file.", default="h200"),
    _flag("weights", "text", WHAT, "Format to plan in: checkpoint, bf16, fp8, mxfp4, nvfp4, int8 or int4; with "
          "--search several, with commas.", default="checkpoint"),
    _flag("kv-cache-dtype", "text", WHAT, "Format of KV: auto, bfloat16, fp8 or int8.", default="auto"),
    _flag("overlap", "switch", WHAT, "Two halves of the rows take turns, one's exchange under the other's experts."),
    _flag("workload", "text", LOAD, "isl=N,osl=N,concurrency=N, and perhaps hit=SHARE of prompts in a prefix cache, "
          "drafts=N,acceptance=CHANCE of speculation.", default="isl=4096,osl=1024,concurrency=256"),
    _flag("popularity", "text", LOAD, "Of experts: uniform, zipf:EXPONENT, or the .json of a load that `moewe record` "
          "wrote.", default="uniform"),
    _flag("search", "switch", SEARCH, "Rank every layout of --gpus GPUs, instead of planning one: one pool, and pools "
          "for prompts and for decoding; load is free."),
    _flag("gpus", "int", SEARCH, "GPUs that there are.", default="those of a domain"),
    _flag("max-ttft", "float", SEARCH, "Target in ms: time to the first token."),
    _flag("max-tpot", "float", SEARCH, "Target in ms: time between tokens."),
    _flag("top", "int", SEARCH, "Layouts to show.", default="12"),
    _flag("plot", "text", SEARCH, "Picture of the Pareto front, .png, .svg or .pdf; needs the optional extra `bench`."),
    _flag("max-num-batched-tokens", "int", MEMORY, "Rows of prompts in a step on an attention replica.",
          default="1024"),
    _flag("gpu-memory-utilization", "float", MEMORY, "Share of a GPU's memory that may be used.", default="0.9"),
    _flag("price", "float", OUTPUT, "Of a GPU for an hour, in any currency: adds the cost of a million tokens."),
    _flag("power", "float", OUTPUT, "Watts of a GPU at work: adds the energy of a token.",
          default="that of the table, where it says one"),
    _flag("json", "switch", OUTPUT, "JSON with every figure, instead of text."),
)  # fmt: skip
