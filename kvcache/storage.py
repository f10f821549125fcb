"""Paged KV of one rank: where the keys and values of all layers lie, by block.

Not an allocator (block_pool.py decides who owns a block) and not attention (attention/paged.py reads it).
Shapes: a layer's K is [num_blocks, block_size, Hkv, Dh] and its V [num_blocks, block_size, Hkv, Dv], with the number of
blocks of its cache group; a slot is block_id * block_size + offset. V of a latent layer is a view into its K. Formats
with scales have [num_blocks, block_size, Hkv] of them beside each, under the same block numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..native.huge_pages import map_huge
from ..native.resident import resident_bytes
from ..quant import SCALE_FORMAT
from .groups import CacheGroup
from .scaled import dequantize_heads, quantize_heads


@dataclass(frozen=True, eq=False)
class Pages:
    """K or V of one layer, as it is stored.

    Attributes:
        elements: [num_blocks, block_size, Hkv, W].
        scales: [num_blocks, block_size, Hkv] of a format with scales, else None.
    """

    elements: torch.Tensor
    scales: torch.Tensor | None

    def read(self, block_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the values of blocks [n] i64: [n, block_size, Hkv, W] in `dtype`."""
        held = self.elements.dtype
        is_fp8 = held.itemsize == 1 and held.is_floating_point  # not every torch selects those on a GPU: as bytes then
        elements = (self.elements.view(torch.uint8) if is_fp8 else self.elements).index_select(0, block_ids).view(held)
        if self.scales is not None:
            elements = dequantize_heads(elements, self.scales.index_select(0, block_ids))
        return elements.to(dtype)


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
        # Of a group: K [len(layers), num_blocks, block_size, Hkv, Dh], V, and their scales without the last dim.
        self._tensors: list[list[torch.Tensor]] = []
        self._layers: dict[int, tuple[Pages, Pages]] = {}
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
            held = group.number_format
            elements = [_zeros((*shape, width), held.torch_dtype, torch.device(device)) for width in widths]
            scales = [_zeros(shape, SCALE_FORMAT.torch_dtype, torch.device(device)) for _ in widths if held.is_scaled]
            self._tensors.append(elements + scales)
            for i, layer in enumerate(group.layers):
                if layer in self._layers:
                    raise ValueError(
                        f"layer {layer} is in cache group {group.name!r} and in another; give it one group"
                    )
                k, *values = (Pages(e[i], scales[j][i] if scales else None) for j, e in enumerate(elements))
                v = values[0] if values else Pages(k.elements[..., : group.value_dim], k.scales)
                self._layers[layer] = (k, v)
                self._group_of[layer] = index

    @property
    def num_bytes(self) -> int:
        """Exact bytes of all groups."""
        return sum(self.bytes_by_format().values())

    def bytes_by_format(self) -> dict[str, int]:
        """Return the same by number format, scales included."""
        held: dict[str, int] = {}
        for group, tensors in zip(self.groups, self._tensors):
            name = group.number_format.name
            held[name] = held.get(name, 0) + sum(tensor.nbytes for tensor in tensors)
        return held

    def block_bytes(self, group: int) -> int:
        """Return the bytes of a block of a cache group, in all of its layers."""
        blocks = self.num_blocks[group]
        return sum(tensor.nbytes for tensor in self._tensors[group]) // blocks if blocks else 0

    def resident_bytes(self) -> int:
        """Return how much of all groups takes memory: on a CPU pages that were written to."""
        tensors = [tensor for tensors in self._tensors for tensor in tensors]
        return sum(
            resident_bytes(tensor.data_ptr(), tensor.nbytes) if tensor.device.type == "cpu" else tensor.nbytes
            for tensor in tensors
        )

    def group_of(self, layer: int) -> int:
        """Return the number of the cache group that `layer` is in."""
        return self._group_of[layer]

    def pages(self, layer: int) -> tuple[Pages, Pages]:
        """Return K and V of `layer`; views."""
        return self._layers[layer]

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the elements of K [num_blocks, block_size, Hkv, Dh] and V [..., Dv] of `layer`; views."""
        k, v = self._layers[layer]
        return k.elements, v.elements

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor | None, slot_mapping: torch.Tensor) -> None:
        """Store the rows of a step, in the format of their cache group.

        Args:
            layer: decoder layer number.
            k: [T, Hkv, Dh].
            v: [T, Hkv, Dv]; None for a latent layer, whose values are a part of `k`.
            slot_mapping: [T] i64, no slot twice.
        """
        group = self.groups[self._group_of[layer]]
        assert (v is None) == (group.kind == "latent"), "values go with the layers that store them"
        for pages, rows in zip(self._layers[layer], (k, v)):
            if rows is None:
                continue
            if pages.scales is not None:
                rows, scales = quantize_heads(rows, group.number_format)
                pages.scales.flatten(0, 1).index_copy_(0, slot_mapping, scales)
            elements = pages.elements.flatten(0, 1)
            _movable(elements).index_copy_(0, slot_mapping, _movable(rows.to(elements.dtype)))

    def zero_blocks(self, block_ids: torch.Tensor | Sequence[int], group: int = 0) -> None:
        """Set blocks of one cache group to zero in its layers (after a sequence whose values were not finite)."""
        for tensor in self._tensors[group]:
            ids = torch.as_tensor(block_ids, dtype=torch.int64, device=tensor.device)
            _movable(tensor).index_fill_(1, ids, 0)


def _movable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory in a type that torch moves by index: it moves no float of eight bits."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros; on a CPU they take no memory before they are written to, since a pool is rarely filled."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(map_huge(num_bytes), dtype=dtype).view(shape)
