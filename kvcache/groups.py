"""Cache groups: which layers share blocks, and how many bytes a block of them holds.

Not storage and not an allocator: a description that both read, as do the byte budget and the scheduler.
Units: bytes, tokens, blocks. A block holds `block_size` tokens of every layer of its group.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..quant import NumberFormat


@dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """Layers whose KV has one lifetime and one block table.

    Attributes:
        name: unique among the groups of a model.
        kind: `full` (every token is kept until the sequence ends). Windowed, latent and state groups come with their
            families.
        layers: decoder layer numbers, ascending.
        num_kv_heads: KV heads that one rank holds.
        head_dim: elements of a head of K and of V.
        number_format: how an element is stored.
    """

    name: str
    kind: str
    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    number_format: NumberFormat

    def bytes_per_token(self) -> int:
        """Bytes that one token of one sequence takes over all layers of the group (K and V)."""
        return 2 * len(self.layers) * self.num_kv_heads * self.head_dim * self.number_format.itemsize

    def bytes_per_block(self, block_size: int) -> int:
        """Exact bytes of one block of `block_size` tokens over all layers of the group."""
        return self.bytes_per_token() * block_size
