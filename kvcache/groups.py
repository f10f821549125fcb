"""Cache groups: which layers share blocks, and how many bytes a block of them holds.

Not storage and not an allocator: a description that both read, as do the byte budget and the scheduler.
Units: bytes, tokens, blocks. A block holds `block_size` tokens of every layer of its group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..topologies.kv_sizes import WINDOWED

if TYPE_CHECKING:
    from ..quant import NumberFormat  # torch comes with it, which the scheduler does without

KINDS = ("full", "window", "chunk", "latent")


def first_visible(kind: str, window: int, position: int) -> int:
    """Return the first position that a row at `position` of a group of `kind` sees; later rows see no earlier one.

    Example:
        >>> first_visible("window", 8, 10), first_visible("chunk", 8, 10), first_visible("full", 0, 10)
        (3, 8, 0)
    """
    if kind == "window":
        return max(0, position - window + 1)
    return position // window * window if kind == "chunk" else 0


def first_visible_rows(kind: str, window: int, positions: np.ndarray) -> np.ndarray:
    """Return `first_visible` of each of `positions`, [n] i64."""
    if kind == "window":
        positions = positions - (window - 1)
        return positions.clip(min=0)
    return positions // window * window if kind == "chunk" else np.zeros_like(positions)


@dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """Layers whose KV has one lifetime and one block table.

    Attributes:
        name: unique among the groups of a model.
        kind: `full` (every token is kept until the sequence ends), `window` (a row sees the last `window` tokens, its
            own included), `chunk` (a row sees its own run of `window` absolute positions) or `latent` (kept like
            `full`; V is the first `value_dim` elements of K and is not stored).
        layers: decoder layer numbers, ascending.
        num_kv_heads: KV heads that one rank holds (1 for `latent`).
        head_dim: elements of a head of K.
        value_dim: elements of a head of V.
        window: of `window` and `chunk`; else 0.
        number_format: how an element is stored, and whether scales stand beside them.
    """

    name: str
    kind: str
    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    value_dim: int
    number_format: NumberFormat
    window: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"cache group {self.name!r} has kind {self.kind!r}; use one of {', '.join(KINDS)}")
        if (self.window > 0) != (self.kind in WINDOWED):
            raise ValueError(f"cache group {self.name!r} of kind {self.kind!r} has window={self.window}")

    def bytes_per_token(self) -> int:
        """Bytes that one token of one sequence takes over all layers of the group (K, and V where it is stored)."""
        widths = (self.head_dim,) if self.kind == "latent" else (self.head_dim, self.value_dim)
        held = self.number_format
        a_head = sum(width * held.itemsize + held.scale_itemsize for width in widths)
        return len(self.layers) * self.num_kv_heads * a_head
