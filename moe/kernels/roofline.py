"""What the kernels of a MoE layer must move and multiply at least, and how long a GPU takes for that at best.

Not a measurement; topologies/kernel_work.py says what is left out.
Letters: T tokens, D width, F expert width, E experts, K top-k, M = T * K rows. Units: bytes, operations, seconds.
"""

from __future__ import annotations

from ...topologies.kernel_work import Work
from .launches import MoEShapes

_FP32, _INDEX, _COUNT = 4, 4, 8


def hit_experts(num_tokens: int, num_experts: int, top_k: int) -> float:
    """Return how many experts some token chooses, on average, where all are chosen alike: E (1 - (1 - K / E)^T)."""
    return num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)


def layer_work(shapes: MoEShapes, num_tokens: int, format_name: str) -> dict[str, Work]:
    """Return the work of each operation of a layer on one GPU that holds all experts.

    Example:
        One token of Qwen3-30B-A3B in bf16: 8 experts of 9.4 MB are read, 75 MB, 16 us on an H200.
    """
    routing, width, ffn_width = shapes.routing, shapes.width, shapes.ffn_width
    itemsize = shapes.dtype.itemsize
    rows = num_tokens * routing.top_k
    weights = shapes.experts(format_name)
    hit = hit_experts(num_tokens, routing.num_experts, routing.top_k)
    # Rows come in once where tokens lie, hidden rows go out and in again, rows of experts go out.
    moved = num_tokens * width + 2 * rows * ffn_width + rows * width
    return {
        "route": Work(bytes=num_tokens * (routing.num_experts * _FP32 + routing.top_k * (_FP32 + 2 * _INDEX))),
        "permute": Work(bytes=3 * rows * _INDEX + routing.num_experts * _COUNT),
        "experts": Work(bytes=hit * weights.bytes_per_slot + moved * itemsize, flops=6.0 * rows * width * ffn_width),
        "combine": Work(bytes=(rows + num_tokens) * width * itemsize + rows * (_FP32 + _INDEX)),
    }


def router_work(shapes: MoEShapes, num_tokens: int) -> Work:
    """Return the work of the router's product in fp32; of few rows, whose operations do not count."""
    num_experts, width = shapes.routing.num_experts, shapes.width
    return Work(bytes=num_experts * width * _FP32 + num_tokens * (width * shapes.dtype.itemsize + num_experts * _FP32))
