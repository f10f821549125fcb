"""The rows between the products of latent attention on a GPU: norm of the latent, rotations and the KV write.

Not the products and not attention. What is computed is what models/latent.py spells out in torch, rounded at the same
places; the latent is stored as kvcache/scaled.py says.
Letters: T rows, H heads, C = kv_rank, R = rope_dim, N = nope_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...kvcache.storage import Pages
from ...native.gpu import GpuTarget, Launch
from .heads import power_of_two
from .pages import kernel_pages

_HEADS_BLOCK = 16  # queries that a program turns


@dataclass(frozen=True, kw_only=True)
class LatentSteps:
    """What a layer does with its rows.

    Attributes:
        kv_rank, rope_dim, nope_dim: C, R, N.
        norm: [C], weights of the norm of the latent.
        eps: of the norm.
        interleaved: pairs that turn stand side by side.
    """

    kv_rank: int
    rope_dim: int
    nope_dim: int
    norm: torch.Tensor
    eps: float
    interleaved: bool


def triton_latent_rows(
    steps: LatentSteps,
    pages: Pages,
    kv: torch.Tensor,
    queries: torch.Tensor,
    q: torch.Tensor,
    slot_mapping: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    *,
    target: GpuTarget,
) -> None:
    """Write the latents of all rows to storage, and the rotated part of the queries to `q`.

    Args:
        steps: what is done.
        pages: K of the layer.
        kv: [T, C + R].
        queries: [T, H, N + R].
        q: [T, H, C + R], of which the last R elements of each head are written.
        slot_mapping: [T] i64; -1 keeps nothing.
        angles: cos and sin, [T, 1, R] f32 each.
        target: the GPU.
    """
    latent_launch(steps, pages, kv, queries, q, slot_mapping, angles, target=target).run()


def latent_launch(
    steps: LatentSteps,
    pages: Pages,
    kv: torch.Tensor,
    queries: torch.Tensor,
    q: torch.Tensor,
    slot_mapping: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    *,
    target: GpuTarget,
) -> Launch:
    """Return the launch behind `triton_latent_rows`."""
    from .latent_triton import latent_rows_kernel

    num_rows, heads, width = queries.shape[0], queries.shape[1], steps.kv_rank + steps.rope_dim
    held = kernel_pages(pages)
    assert kv.shape == (num_rows, width) and q.shape == (num_rows, heads, width), (kv.shape, q.shape)
    assert queries.shape[2] == steps.nope_dim + steps.rope_dim, queries.shape
    assert held.elements.shape[2:] == (1, width) and slot_mapping.dtype == torch.int64, held.elements.shape
    for part in (kv, queries, q, held.elements, steps.norm, *angles):
        assert part.is_contiguous(), part.stride()
    block = power_of_two(width)
    return Launch(
        kernel=latent_rows_kernel,
        grid=(num_rows, 1 + -(-heads // _HEADS_BLOCK)),
        arguments={
            "kv": kv, "queries": queries, "q": q, "pages": held.elements, "scales": held.scales,
            "slots": slot_mapping, "cos": angles[0], "sin": angles[1], "norm": steps.norm, "eps": steps.eps,
        },
        constants={
            "HEADS": heads, "KV_RANK": steps.kv_rank, "ROPE_DIM": steps.rope_dim, "NOPE_DIM": steps.nope_dim,
            "INTERLEAVED": steps.interleaved, "HEADS_BLOCK": min(_HEADS_BLOCK, power_of_two(heads)),
            "ROPE_BLOCK": power_of_two(steps.rope_dim), "WIDTH_BLOCK": block, "FORMAT": held.format,
            "FP8_BYTES": not target.has_fp8,
        },
        fuses_products=False,  # torch rounds a product before it adds it
    )  # fmt: skip
