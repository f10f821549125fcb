"""Every launch over rows of logits, from the size of a vocabulary: to compile them before they are needed.

Tensors are of device `meta`, which has no memory. Letters: N rows, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ....native.gpu import Launch
from .rows import draw_launch, logprobs_launch, scan_launch

_NUM_ROWS = 2


def sampling_launches(vocab: int, width: int) -> Iterator[Launch]:
    """Yield the launches for logits [N, V] in fp32, and that which looks for numbers in hidden rows [N, D] in bf16."""
    logits = _rows(torch.float32, vocab)
    numbers, wide, ids = _rows(torch.float32), _rows(torch.float64), _rows(torch.int64)
    yield scan_launch(logits)[0]
    yield scan_launch(_rows(torch.bfloat16, width))[0]
    yield logprobs_launch(logits, ids, ids, 0.0)[0]
    yield draw_launch(logits, numbers, numbers, ids, wide, wide)[0]


def _rows(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(_NUM_ROWS, *shape, dtype=dtype, device="meta")
