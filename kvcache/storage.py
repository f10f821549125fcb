"""Paged KV of one rank: where the keys and values of all layers lie, by block.

Not an allocator (block_pool.py decides who owns a block) and not attention (attention/paged.py reads it).
Shapes: a layer's K and V are [num_blocks, block_size, Hkv, Dh] each; a slot is block_id * block_size + offset.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch

from .groups import CacheGroup


class KVStorage:
    """The KV tensors of all cache groups of one rank.

    Starts as zeros: attention multiplies masked positions by zero, and zero times a stray NaN would be NaN.

    Args:
        groups: cache groups of kind `full`; no layer in two of them.
        num_blocks: blocks of every group.
        block_size: tokens a block.
        device: where the tensors live.

    Raises:
        ValueError: a group's kind or layers cannot be stored.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        *,
        num_blocks: int,
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.groups = tuple(groups)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._tensors: list[torch.Tensor] = []  # one a group: [len(layers), 2, num_blocks, block_size, Hkv, Dh]
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._flat: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # [num_blocks * block_size, Hkv, Dh]
        self._bytes_per_token: dict[int, int] = {}
        for group in self.groups:
            if group.kind != "full":
                raise ValueError(f"cache group {group.name!r} has kind {group.kind!r}; this version stores only 'full'")
            shape = (len(group.layers), 2, num_blocks, block_size, group.num_kv_heads, group.head_dim)
            tensor = _zeros(shape, group.number_format.torch_dtype, torch.device(device))
            self._tensors.append(tensor)
            for i, layer in enumerate(group.layers):
                if layer in self._layers:
                    raise ValueError(
                        f"layer {layer} is in cache group {group.name!r} and in another; give it one group"
                    )
                k, v = tensor[i, 0], tensor[i, 1]
                self._layers[layer] = (k, v)
                self._flat[layer] = (k.flatten(0, 1), v.flatten(0, 1))
                self._bytes_per_token[layer] = group.bytes_per_token() // len(group.layers)

    @property
    def num_bytes(self) -> int:
        """Exact bytes of all groups."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors)

    def bytes_per_token(self, layer: int) -> int:
        """Bytes of K and V of one token in `layer`."""
        return self._bytes_per_token[layer]

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of `layer`, each [num_blocks, block_size, Hkv, Dh]; views, not copies."""
        return self._layers[layer]

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store the rows of a step.

        Args:
            layer: decoder layer number.
            k: [T, Hkv, Dh].
            v: [T, Hkv, Dh].
            slot_mapping: [T] i64, no slot twice.
        """
        flat_k, flat_v = self._flat[layer]
        flat_k.index_copy_(0, slot_mapping, k)
        flat_v.index_copy_(0, slot_mapping, v)

    def zero_blocks(self, block_ids: torch.Tensor | Sequence[int]) -> None:
        """Set blocks to zero in every layer (after a sequence whose values were not finite)."""
        for tensor in self._tensors:
            ids = torch.as_tensor(block_ids, dtype=torch.int64, device=tensor.device)
            tensor.index_fill_(2, ids, 0)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros; on a CPU they take no memory before they are written to, since a pool is rarely filled."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
