"""What other servers can be asked for and this version lacks: a name to one line that says so.

Not the options that moewe has (runtime/options.py, server/flags/table.py). One table answers flags, files and `LLM`.
No shapes; names are in lower case with dashes.
"""

from __future__ import annotations

_LAYOUT = {
    "tp": "tensor parallelism", "tp-size": "tensor parallelism", "tensor-parallel-size": "tensor parallelism",
    "dp": "data parallelism", "dp-size": "data parallelism", "data-parallel-size": "data parallelism",
    "enable-dp-attention": "data parallelism",
    "ep": "expert parallelism", "ep-size": "expert parallelism", "expert-parallel-size": "expert parallelism",
    "enable-expert-parallel": "expert parallelism",
    "pp": "pipeline parallelism", "pp-size": "pipeline parallelism",
    "pipeline-parallel-size": "pipeline parallelism",
}  # fmt: skip

_EPLB = ("enable-eplb", "eplb-config", "eplb-algorithm", "init-expert-location")
_REDUNDANT = ("num-redundant-experts", "ep-num-redundant-experts")
_EXCHANGE = ("all2all-backend", "moe-a2a-backend")
_OVERLAP = ("enable-dbo", "dbo-decode-token-threshold", "dbo-prefill-token-threshold", "enable-two-batch-overlap",
            "enable-single-batch-overlap", "tbo-token-distribution-threshold")  # fmt: skip

_PREFILL_GRAPHS = ("cuda-graph-backend-prefill", "enable-piecewise-cuda-graph", "disable-cuda-graph-padding")

_LACKING = {
    "quantized weights": ("q", "quantization", "quantization-config", "quantization-param-path", "torchao-config"),
    "a prefix cache": ("enable-prefix-caching", "prefix-caching-hash-algo", "enable-hierarchical-cache"),
    "speculative decoding": ("speculative-config", "speculative-algorithm", "speculative-model",
                             "speculative-num-steps", "speculative-draft-model-path", "num-speculative-tokens"),
    "tool calls": ("tool-call-parser", "enable-auto-tool-choice", "tool-server", "tool-parser-plugin"),
    "reasoning parsers": ("reasoning-parser", "enable-reasoning"),
    "a choice of attention backends": ("attention-backend", "prefill-attention-backend", "decode-attention-backend"),
    "a choice of MoE backends": ("moe-backend", "moe-runner-backend"),
    "kernels of DeepEP": ("deepep-mode", "deepep-config"),
    "LoRA adapters": ("enable-lora", "lora-modules", "lora-paths", "max-loras", "max-lora-rank"),
    "transfer of KV between servers": ("kv-transfer-config", "disaggregation-mode", "disaggregation-transfer-backend"),
    "structured output": ("guided-decoding-backend", "grammar-backend", "structured-outputs-config"),
    "offloading of weights or KV": ("cpu-offload-gb", "swap-space", "kv-offloading-size"),
    "code from checkpoints": ("trust-remote-code",),
    "compilation by torch": ("compilation-config", "enable-torch-compile", "torch-compile-max-bs"),
    "several hosts": ("nnodes", "node-rank", "dist-init-addr", "data-parallel-address"),
}  # fmt: skip
_LACKED_BY_NAME = {name: what for what, names in _LACKING.items() for name in names}


def foreign(name: str) -> str | None:
    """Return why `name` is not an option here, for a name of another server; None for every other.

    Args:
        name: as the user wrote it, a flag or a keyword.

    Example:
        >>> foreign("--enable-lora")
        '--enable-lora asks for LoRA adapters, and this version has none of it; leave it out'
    """
    key = name.lstrip("-").replace("_", "-")
    if key in _LAYOUT:
        return (
            f"{name} ({_LAYOUT[key]}) is not an option of moewe; one topology says it all: "
            "EP8DP1 is one group of 8 ranks, EP8DP2 two such groups"
        )
    if key in _EXCHANGE:
        return f"{name} is not an option of moewe; leave the choice open, or use exchange: shm, all_to_all, padded"
    if key in _OVERLAP:
        return f"{name} is not an option of moewe; overlap says it: auto, by a model of each step, on, or off"
    if key in _EPLB:
        return (
            f"{name} is not an option of moewe; eplb places experts by load: --eplb auto moves them while serving, "
            "--eplb static FILE takes what moewe record --load FILE writes"
        )
    if key in _REDUNDANT:
        return f"{name} is not an option of moewe; the topology says it: EP8DP1[red=16] has 16 redundant slots"
    if key in _PREFILL_GRAPHS:
        return (
            f"{name} is not an option of moewe: decode steps run as CUDA graphs, prefill does not; "
            "--cuda-graph-sizes, --cuda-graph-max-bs and --enforce-eager say which"
        )
    if key in _LACKED_BY_NAME:
        return f"{name} asks for {_LACKED_BY_NAME[key]}, and this version has none of it; leave it out"
    return None
