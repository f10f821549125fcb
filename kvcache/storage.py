"""Paged KV of one rank: where the keys and values of all layers lie, by block.

Not an allocator (block_pool.py decides who owns a block) and not attention (attention/paged.py reads it).
Shapes: a layer's K is [num_blocks, block_size, Hkv, Dh] and its V [num_blocks, block_size, Hkv, Dv], with the number of
blocks of its cache group; a slot is block_id * block_size + offset. V of a latent layer is a view into its K.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..native.huge_pages import map_huge
from .groups import CacheGroup


class KVStorage:
    """The KV tensors of all cache groups of one rank.

    Starts as zeros: attention multiplies masked positions by zero, and zero times a stray NaN would be NaN.

    Args:
        groups: cache groups; no layer in two of them.
        num_blocks: blocks of every group, or one number a group.
        block_size: tokens a block.
        device: where the tensors live.

    Attributes:
        num_blocks: one number a group.

    Raises:
        ValueError: the groups share a layer, or there is not one number of blocks for each.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        *,
        num_blocks: int | Sequence[int],
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.groups = tuple(groups)
        self.num_blocks = (num_blocks,) * len(self.groups) if isinstance(num_blocks, int) else tuple(num_blocks)
        self.block_size = block_size
        self._tensors: list[list[torch.Tensor]] = []  # a group: K [len(layers), num_blocks, block_size, Hkv, Dh], V
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._flat: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}  # [num_blocks * block_size, Hkv, width]
        self._group_of: dict[int, int] = {}
        if len(self.num_blocks) != len(self.groups):
            raise ValueError(f"{len(self.num_blocks)} numbers of blocks for {len(self.groups)} cache groups")
        for index, (group, blocks) in enumerate(zip(self.groups, self.num_blocks)):
            latent = group.kind == "latent"
            if latent and group.value_dim > group.head_dim:
                raise ValueError(
                    f"cache group {group.name!r} has value_dim={group.value_dim}, but its values are the first "
                    f"elements of keys of head_dim={group.head_dim}"
                )
            shape = (len(group.layers), blocks, block_size, group.num_kv_heads)
            widths = (group.head_dim,) if latent else (group.head_dim, group.value_dim)
            dtype = group.number_format.torch_dtype
            tensors = [_zeros((*shape, width), dtype, torch.device(device)) for width in widths]
            self._tensors.append(tensors)
            for i, layer in enumerate(group.layers):
                if layer in self._layers:
                    raise ValueError(
                        f"layer {layer} is in cache group {group.name!r} and in another; give it one group"
                    )
                k = tensors[0][i]
                v = k[..., : group.value_dim] if latent else tensors[1][i]
                self._layers[layer] = (k, v)
                self._flat[layer] = (k.flatten(0, 1), None if latent else v.flatten(0, 1))
                self._group_of[layer] = index

    @property
    def num_bytes(self) -> int:
        """Exact bytes of all groups."""
        return sum(tensor.numel() * tensor.element_size() for tensors in self._tensors for tensor in tensors)

    def group_of(self, layer: int) -> int:
        """Return the number of the cache group that `layer` is in."""
        return self._group_of[layer]

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K [num_blocks, block_size, Hkv, Dh] and V [num_blocks, block_size, Hkv, Dv] of `layer`; views."""
        return self._layers[layer]

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor | None, slot_mapping: torch.Tensor) -> None:
        """Store the rows of a step.

        Args:
            layer: decoder layer number.
            k: [T, Hkv, Dh].
            v: [T, Hkv, Dv]; None for a latent layer, whose values are a part of `k`.
            slot_mapping: [T] i64, no slot twice.
        """
        flat_k, flat_v = self._flat[layer]
        assert (v is None) == (flat_v is None), "values go with the layers that store them"
        flat_k.index_copy_(0, slot_mapping, k)
        if flat_v is not None and v is not None:
            flat_v.index_copy_(0, slot_mapping, v)

    def zero_blocks(self, block_ids: torch.Tensor | Sequence[int], group: int = 0) -> None:
        """Set blocks of one cache group to zero in its layers (after a sequence whose values were not finite)."""
        for tensor in self._tensors[group]:
            ids = torch.as_tensor(block_ids, dtype=torch.int64, device=tensor.device)
            tensor.index_fill_(1, ids, 0)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros; on a CPU they take no memory before they are written to, since a pool is rarely filled."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(map_huge(num_bytes), dtype=dtype).view(shape)
