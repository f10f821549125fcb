"""The same layout in the flags of other servers; where they cannot express it, a line that says why.

Not our own flags and not a translation of command lines (runtime/foreign.py). A layout of y replicas is y servers.
Units: ranks.
"""

from __future__ import annotations

from ..spec import Topology


def foreign_flags(topology: Topology, model: str) -> dict[str, list[str]]:
    """Return lines for `vllm`, `sglang` and `tensorrt-llm`, one replica of `topology` each.

    Definitions: vLLM's expert-parallel size is its TP times its DP; SGLang's TP is the width of the whole group, its DP
    attention replicas inside it; TensorRT-LLM knows attention that is data parallel over all ranks or over none.
    """
    times = [f"# {topology.dp} times, each on {topology.ep} GPUs, behind a router"] if topology.dp > 1 else []
    return {
        "vllm": [*times, _vllm(topology, model)],
        "sglang": [*times, _sglang(topology, model)],
        "tensorrt-llm": [*times, *_tensorrt(topology, model)],
    }


def _vllm(topology: Topology, model: str) -> str:
    words = [f"vllm serve {model} --tensor-parallel-size {topology.atp}"]
    if topology.adp > 1:
        words.append(f"--data-parallel-size {topology.adp}")
    if topology.ep > 1:
        words.append("--enable-expert-parallel")
    if topology.red:
        words.append(f"--enable-eplb --eplb-config '{{\"num_redundant_experts\": {topology.red}}}'")
    return " ".join(words)


def _sglang(topology: Topology, model: str) -> str:
    words = [f"python -m sglang.launch_server --model-path {model} --tp {topology.ep}"]
    if topology.adp > 1:
        words.append(f"--dp {topology.adp} --enable-dp-attention")
    if topology.ep > 1:
        words.append(f"--ep {topology.ep}")
    if topology.red:
        words.append(f"--enable-eplb --ep-num-redundant-experts {topology.red}")
    return " ".join(words)


def _tensorrt(topology: Topology, model: str) -> list[str]:
    if topology.adp not in (1, topology.ep):
        return [f"# not possible: attention is data parallel over all {topology.ep} ranks or over none, not over "
                f"{topology.adp}"]  # fmt: skip
    lines = [
        f"trtllm-serve {model} --config options.yaml",
        f"# options.yaml: tensor_parallel_size: {topology.ep}",
        f"#               moe_expert_parallel_size: {topology.ep}",
        f"#               enable_attention_dp: {'true' if topology.adp > 1 else 'false'}",
    ]
    if topology.red:
        lines.append("#               moe_config: {load_balancer: balancer.yaml}, and there num_slots: E + "
                     f"{topology.red}")  # fmt: skip
    return lines
