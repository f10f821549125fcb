"""Norm of heads, rotation, query temperature and the write of K and V on a GPU, in one launch over the rows of a step.

Not the product that makes q, k and v and not attention. What is computed is what models/layers.py spells out in torch,
rounded at the same places; K and V are stored as kvcache/scaled.py says.
Letters: T rows, H query heads, Hkv KV heads, Dh head width, R rotated elements.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...kvcache.storage import Pages
from ...native.gpu import GpuTarget, Launch
from ..native_heads import HeadSteps
from .pages import kernel_pages

_TILE = 1024  # elements of a program: eight a thread
_ELEMENTS_A_WARP = 256


class HeadsConfig(NamedTuple):
    """Heads that a program takes, and its warps."""

    heads_block: int
    num_warps: int


def pick_config(steps: HeadSteps) -> HeadsConfig:
    """Return a choice: all heads at once where one norm goes over them all, else some eight elements a thread."""
    width, most = power_of_two(steps.head_dim), power_of_two(max(steps.num_heads, steps.num_kv_heads))
    block = most if steps.head_norm == "full" else min(most, max(1, _TILE // width))
    return HeadsConfig(block, max(1, min(16, block * width // _ELEMENTS_A_WARP)))


def power_of_two(number: int) -> int:
    """Return the least power of two that is no smaller."""
    return 1 << (number - 1).bit_length()


def triton_heads(
    steps: HeadSteps,
    pages: tuple[Pages, Pages],
    qkv: torch.Tensor,
    slot_mapping: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    temperature: torch.Tensor | None = None,
    target: GpuTarget,
) -> torch.Tensor:
    """Write K and V of all rows and return the queries.

    Args:
        steps: what is done.
        pages: K and V of the layer.
        qkv: [T, (H + 2 Hkv) * Dh].
        slot_mapping: [T] i64; -1 keeps nothing.
        angles: cos and sin, [T, 1, R] f32 each; None where nothing is rotated.
        temperature: [T, 1, 1] f32, factor on the queries.
        target: the GPU.

    Returns:
        [T, H, Dh] in the dtype of `qkv`.
    """
    launch, q = heads_launch(steps, pages, qkv, slot_mapping, angles, temperature=temperature, target=target)
    launch.run()
    return q


def heads_launch(
    steps: HeadSteps,
    pages: tuple[Pages, Pages],
    qkv: torch.Tensor,
    slot_mapping: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    temperature: torch.Tensor | None = None,
    target: GpuTarget,
) -> tuple[Launch, torch.Tensor]:
    """Return the launch behind `triton_heads` and where the queries will stand."""
    from .heads_triton import heads_kernel

    num_rows, heads, kv_heads, width = qkv.shape[0], steps.num_heads, steps.num_kv_heads, steps.head_dim
    assert qkv.shape[1] == (heads + 2 * kv_heads) * width and qkv.stride(1) == 1, qkv.shape
    assert (angles is not None) == (steps.rotary_dim > 0), "angles go with a rotation"
    assert (steps.norm_weights is not None) == (steps.head_norm in ("head", "full")), "weights of another norm"
    k, v = map(kernel_pages, pages)
    assert k.elements.shape[2:] == v.elements.shape[2:] == (kv_heads, width), k.elements.shape
    assert k.elements.is_contiguous() and v.elements.is_contiguous() and slot_mapping.dtype == torch.int64
    for part in (*(angles or ()), temperature):
        assert part is None or (part.dtype == torch.float32 and part.is_contiguous() and len(part) == num_rows)
    q = qkv.new_empty(num_rows, heads, width)
    config = pick_config(steps)
    launch = Launch(
        kernel=heads_kernel,
        grid=(num_rows, sum(-(-number // config.heads_block) for number in (heads, kv_heads, kv_heads))),
        arguments={
            "qkv": qkv, "q": q, "k_pages": k.elements, "v_pages": v.elements, "k_scales": k.scales,
            "v_scales": v.scales, "slots": slot_mapping, "cos": angles and angles[0], "sin": angles and angles[1],
            "temperature": temperature, "weights": steps.norm_weights, "stride": qkv.stride(0), "eps": steps.eps,
        },
        constants={
            "HEADS": heads, "KV_HEADS": kv_heads, "HEAD_DIM": width, "ROTARY_DIM": steps.rotary_dim,
            "INTERLEAVED": steps.interleaved, "NORM": steps.head_norm or "none", "NORM_AFTER": steps.norm_after_rotary,
            "HEADS_BLOCK": config.heads_block, "DIM_BLOCK": power_of_two(width), "FORMAT": k.format,
            "FP8_BYTES": not target.has_fp8,
        },
        num_warps=config.num_warps,
        fuses_products=False,  # torch rounds a product before it adds it
    )  # fmt: skip
    return launch, q
