"""What attention and the KV write must move and multiply at least.

Not a measurement; topologies/kernel_work.py says what is left out. Sums of splits of decode are left out too: they are
written and read again, but stay in the second-level cache. KV counts as it is stored, scales included, once for each
sequence however many rows of it there are.
Letters: T rows, H query heads, Dh and Dv widths of a head of K and V, R rotated elements, D = H * Dh. Units: bytes,
tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ...kvcache.groups import CacheGroup, first_visible, first_visible_rows
from ...topologies.kernel_work import Work

_FP32, _SLOT, _BF16 = 4, 8, 2


@dataclass(frozen=True, kw_only=True)
class AttentionRows:
    """What of a layer attention depends on.

    Attributes:
        group: the cache group; its bytes count for one of its layers.
        num_heads: H.
        itemsize: of queries and of what comes out.
    """

    group: CacheGroup
    num_heads: int
    itemsize: int = _BF16

    @property
    def kv_bytes(self) -> float:
        """Bytes of one token of the layer."""
        return self.group.bytes_per_token() / len(self.group.layers)

    def work(self, runs: Iterable[tuple[int, int]]) -> Work:
        """Return the work of runs of (tokens before, rows): single rows are decode, others prefill.

        A pair of a row and a token that it sees takes 2 * H * (Dh + Dv) operations; tokens that some row of a run sees
        are read once.

        Example:
            A row behind 8,191 tokens of Qwen3-30B-A3B in bf16 reads 8,192 * 2 * 4 * 128 * 2 bytes of K and V, 17 MB.
        """
        kind, window = self.group.kind, self.group.window
        pairs = tokens = rows = 0
        for before, number in runs:
            positions = np.arange(before, before + number)
            pairs += int((positions + 1 - first_visible_rows(kind, window, positions)).sum())
            tokens += before + number - first_visible(kind, window, before)
            rows += number
        widths = self.num_heads * (self.group.head_dim + self.group.value_dim)
        return Work(
            bytes=tokens * self.kv_bytes + rows * widths * self.itemsize, flops=2.0 * pairs * widths
        )  # fmt: skip

    def decode(self, sequences: int, context: int) -> Work:
        """Return the work of one row each of `sequences` that hold `context` tokens, the row's own included."""
        one = self.work([(context - 1, 1)])
        return Work(bytes=sequences * one.bytes, flops=sequences * one.flops)

    def heads(self, num_rows: int, rotary_dim: int) -> Work:
        """Return the work of `triton_heads`: q, k and v in, q out, KV stored, angles and slots read."""
        widths = self.num_heads * self.group.head_dim
        kv = self.group.num_kv_heads * (self.group.head_dim + self.group.value_dim)
        a_row = (2 * widths + kv) * self.itemsize + self.kv_bytes + 2 * rotary_dim * _FP32 + _SLOT
        return Work(bytes=num_rows * a_row)

    def latent_rows(self, num_rows: int) -> Work:
        """Return the work of `triton_latent_rows`: latents in and stored, the rotated part of queries in and out."""
        rotary_dim = self.group.head_dim - self.group.value_dim
        turned = 2 * self.num_heads * rotary_dim
        a_row = (self.group.head_dim + turned) * self.itemsize + self.kv_bytes + 2 * rotary_dim * _FP32 + _SLOT
        return Work(bytes=num_rows * a_row)
