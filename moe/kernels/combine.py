"""The sum of each token's expert outputs on a GPU: what wide_ep/exchanges/pairs.py `add_pairs` is in torch, to the bit.

Not an exchange. The reference is wide_ep/exchanges/reference.py `combine_reference`.
Letters: T tokens, K top-k, M rows, D width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...native.gpu import Launch

_WIDEST_BLOCK = 1024  # eight elements a thread: 16 bytes of bf16


class ExpertRows(NamedTuple):
    """Outputs of experts that nobody has added up yet: whoever needs their sum adds on the way, or calls `sum`.

    Attributes:
        rows: [M, D], outputs of experts.
        topk_weights: [T, K] f32; those of dropped choices are not read.
        row_of: [T, K] i32, the row of each choice, -1 for a dropped one.
        shared: [T, D], added to the rounded sum, and rounded; None: nothing is.
    """

    rows: torch.Tensor
    topk_weights: torch.Tensor
    row_of: torch.Tensor
    shared: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Of the sum: T, D."""
        return len(self.row_of), self.rows.shape[1]

    def checked(self) -> ExpertRows:
        """Return itself if a kernel can take it."""
        assert self.topk_weights.shape == self.row_of.shape, self.topk_weights.shape
        assert self.topk_weights.dtype == torch.float32 and self.row_of.dtype == torch.int32, self.row_of.dtype
        for tensor in self:
            assert tensor is None or tensor.is_contiguous(), tensor.stride()
        assert self.shared is None or (self.shared.dtype == self.rows.dtype and self.shared.shape == self.shape)
        return self

    def sum(self) -> torch.Tensor:
        """Return [T, D] in the dtype of `rows`: the rows of each token with their weights."""
        launch, out = combine_launch(self)
        launch.run()
        return out


def triton_combine(
    rows: torch.Tensor, topk_weights: torch.Tensor, row_of: torch.Tensor, *, shared: torch.Tensor | None = None
) -> torch.Tensor:
    """Add the rows of each token with their weights: ascending k, in fp32, rounded once; see `ExpertRows`."""
    return ExpertRows(rows, topk_weights, row_of, shared).sum()


def combine_launch(experts: ExpertRows) -> tuple[Launch, torch.Tensor]:
    """Return the launch behind `triton_combine` and where its result will stand."""
    from .combine_triton import combine_kernel

    rows, topk_weights, row_of, shared = experts.checked()
    num_tokens, width = experts.shape
    out = rows.new_empty(num_tokens, width)
    block = min(1 << (width - 1).bit_length(), _WIDEST_BLOCK)
    launch = Launch(
        kernel=combine_kernel,
        grid=(num_tokens, -(-width // block)),
        arguments={
            "rows": rows, "row_of": row_of, "weights": topk_weights, "shared": shared, "out": out, "width": width,
        },
        constants={"WIDTH_BLOCK": block, "TOP_K": row_of.shape[1]},
        fuses_products=False,
    )  # fmt: skip
    return launch, out
