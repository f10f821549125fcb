"""The router's product of few rows in Triton, in fp32; router.py launches it.

Letters: T rows, E experts, D width.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def router_kernel(
    x, weight, bias, logits, num_rows, num_experts, width, ROWS: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Logits of ROWS rows for EXPERTS experts: each thread adds up its inputs of all of them, threads last.

    No tensor core multiplies fp32 exactly, and of few rows the bytes of the matrix are what takes time.
    """
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    x_rows = x + tl.minimum(row, num_rows - 1).to(tl.int64)[:, None] * width
    weight_rows = weight + tl.minimum(expert, num_experts - 1).to(tl.int64)[:, None] * width
    total = tl.zeros([ROWS, EXPERTS, BLOCK_K], tl.float32)
    for start in range(0, width, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)[None, :]
        inputs = tl.load(x_rows + k, mask=k < width, other=0.0).to(tl.float32)
        weights = tl.load(weight_rows + k, mask=k < width, other=0.0)
        total += inputs[:, None, :] * weights[None, :, :]
    result = tl.sum(total, 2)
    present = (row < num_rows)[:, None] & (expert < num_experts)[None, :]
    if bias is not None:
        result += tl.load(bias + expert, mask=expert < num_experts, other=0.0)[None, :]
    tl.store(logits + row[:, None] * num_experts + expert[None, :], result, mask=present)
