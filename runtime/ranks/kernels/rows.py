"""Rows of logits on a GPU: the best place and finite numbers, log-probabilities, and tokens by chance without a sort.

What is computed is what row_scan.py, logprobs.py and sampler.py say; ties go to the lower id everywhere.
Letters: N rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from ....native.gpu import Launch
from ..host_memory import Send, Sender
from ..native_draw import DrawSettings
from ..randomness import uniform

_WIDEST_BLOCK = 4096
_WIDEST_DRAW_BLOCK = 2048  # four comparisons an element
_NUM_WARPS = 8


def triton_scan(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where the largest number of each row of [N, V] stands [N] i64, and which are all finite [N] bool."""
    launch, best, finite = scan_launch(values)
    launch.run()
    return best, finite.view(torch.bool)


def scan_launch(values: torch.Tensor) -> tuple[Launch, torch.Tensor, torch.Tensor]:
    """Return the launch behind `triton_scan` and where its results will stand."""
    from .rows_triton import scan_kernel

    num_rows, width = values.shape
    assert values.is_contiguous() and width > 0, values.shape
    best = values.new_empty(num_rows, dtype=torch.int64)
    finite = values.new_empty(num_rows, dtype=torch.int8)
    launch = Launch(
        kernel=scan_kernel,
        grid=(num_rows,),
        arguments={"values": values, "best": best, "finite": finite, "width": width},
        constants={"BLOCK": _block(width, _WIDEST_BLOCK)},
        num_warps=_NUM_WARPS,
    )
    return launch, best, finite


def triton_logprobs(
    logits: torch.Tensor, row_ids: torch.Tensor, tokens: torch.Tensor, least: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of one token an answer, and how many logits of its row are at least as large.

    Args:
        logits: [M, V], without NaN.
        row_ids: [N] i64, rows of the answers.
        tokens: [N] i64.
        least: what log-probabilities are raised to.

    Returns:
        [N] f32 and [N] i64.
    """
    launch, chosen, ranks = logprobs_launch(logits, row_ids, tokens, least)
    launch.run()
    return chosen, ranks


def logprobs_launch(
    logits: torch.Tensor, row_ids: torch.Tensor, tokens: torch.Tensor, least: float
) -> tuple[Launch, torch.Tensor, torch.Tensor]:
    """Return the launch behind `triton_logprobs` and where its results will stand."""
    from .rows_triton import logprobs_kernel

    width, num = logits.shape[1], len(tokens)
    assert logits.is_contiguous() and row_ids.shape == tokens.shape, (logits.stride(), row_ids.shape, tokens.shape)
    chosen = logits.new_empty(num, dtype=torch.float32)
    ranks = logits.new_empty(num, dtype=torch.int64)
    launch = Launch(
        kernel=logprobs_kernel,
        grid=(num,),
        arguments={
            "logits": logits, "row_ids": row_ids, "tokens": tokens, "chosen": chosen, "ranks": ranks, "width": width,
            "least": float(least),
        },
        constants={"BLOCK": _block(width, _WIDEST_BLOCK)},
        num_warps=_NUM_WARPS,
    )  # fmt: skip
    return launch, chosen, ranks


def triton_draw(logits: torch.Tensor, rows: DrawSettings, send: Send | None = None) -> torch.Tensor:
    """Choose a token for each row of `logits` [N, V] f32 by chance, [N] i64; the best of each row is finite.

    Settings go through `send`, or through memory of their own.
    """
    send = send or Sender(logits.device)
    launch, tokens = draw_launch(
        logits.contiguous(),
        send(rows.temperature.astype(np.float32)),
        send(rows.min_p.astype(np.float32)),
        send(np.ascontiguousarray(rows.top_k, np.int64)),
        send(np.ascontiguousarray(rows.top_p, np.float64)),
        send(uniform(rows.seed, rows.position)),
    )
    launch.run()
    return tokens


def draw_launch(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    min_ps: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    chances: torch.Tensor,
) -> tuple[Launch, torch.Tensor]:
    """Return the launch behind `triton_draw` and where the tokens will stand; settings [N] f32, f32, i64, f64, f64."""
    from .rows_triton import draw_kernel

    num_rows, width = logits.shape
    assert logits.is_contiguous() and logits.dtype == torch.float32, (logits.stride(), logits.dtype)
    tokens = logits.new_empty(num_rows, dtype=torch.int64)
    launch = Launch(
        kernel=draw_kernel,
        grid=(num_rows,),
        arguments={
            "logits": logits, "temperatures": temperatures, "min_ps": min_ps, "top_ks": top_ks, "top_ps": top_ps,
            "chances": chances, "tokens": tokens, "width": width,
        },
        constants={"BLOCK": _block(width, _WIDEST_DRAW_BLOCK)},
        num_warps=_NUM_WARPS,
    )  # fmt: skip
    return launch, tokens


def _block(width: int, most: int) -> int:
    return min(most, 1 << (width - 1).bit_length())
