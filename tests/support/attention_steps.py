"""Steps of attention over made-up sequences, and what each row of them must get, from K and V that lie in one piece.

Not the reference (attention/reference.py computes a row): this lays sequences out in blocks the way a hostile scheduler
would. Every block that is not a sequence's own holds NaN, and so do those whose entries in a table are stale.
Where KV has scales, what a row must get follows from the values that are stored.
Shapes: T rows, H query heads, Hkv KV heads, Dh and Dv widths, L tokens of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from moewe.attention import reference
from moewe.attention.batch import AttentionBatch, AttentionOptions
from moewe.attention.build import build_attention_batch, build_native_batch
from moewe.kvcache import CacheGroup
from moewe.kvcache.scaled import dequantize_heads, quantize_heads
from moewe.kvcache.storage import KVStorage
from moewe.quant import FORMATS, KV_FORMATS, NumberFormat

LAYER = 3


@dataclass(frozen=True)
class Shape:
    """Of a layer: heads, widths, cache group and block."""

    heads: tuple[int, int] = (4, 2)  # H, Hkv
    widths: tuple[int, int] = (8, 8)  # Dh, Dv
    kind: str = "full"
    window: int = 0
    block_size: int = 4
    dtype: str = "float32"
    kv_dtype: str | None = None  # of storage; None: as the rows

    @property
    def kv_format(self) -> NumberFormat:
        return (FORMATS | KV_FORMATS)[self.kv_dtype or self.dtype]

    def stored(self, heads: torch.Tensor) -> torch.Tensor:
        """Return `heads` [..., W] as they come out of storage."""
        held = self.kv_format
        return dequantize_heads(*quantize_heads(heads, held)) if held.is_scaled else heads.to(held.torch_dtype)

    def group(self) -> CacheGroup:
        return CacheGroup(
            name="g",
            kind=self.kind,
            layers=(0, LAYER),
            num_kv_heads=self.heads[1],
            head_dim=self.widths[0],
            value_dim=self.widths[1],
            number_format=self.kv_format,
            window=self.window,
        )


@dataclass(frozen=True)
class Rows:
    """A run of rows of one sequence, as `build_attention_batch` takes it."""

    row_start: int
    num_rows: int
    num_computed_tokens: int
    block_table: np.ndarray


@dataclass(frozen=True)
class Sequence:
    """K [L, Hkv, Dh] and V [L, Hkv, Dv] in one piece."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class Step:
    """A step, ready to run. `owners` has the sequence and the position of every row."""

    shape: Shape
    q: torch.Tensor
    storage: KVStorage
    batch: AttentionBatch
    sequences: list[Sequence]
    owners: list[tuple[int, int]]

    def expected(self, options: AttentionOptions) -> torch.Tensor:
        """Return [T, H, Dv] f64."""
        rows = [
            expected_row(self.shape, self.q[i], self.sequences[owner], position, options)
            for i, (owner, position) in enumerate(self.owners)
        ]
        return torch.stack(rows) if rows else torch.empty(0, self.shape.heads[0], self.shape.widths[1]).double()

    def pairs_scored(self) -> int:
        """Count the pairs of a row and a token that it sees."""
        kind, window = self.shape.kind, self.shape.window
        return sum(position + 1 - reference.first_seen(kind, window, position) for _, position in self.owners)

    def tokens_seen(self) -> int:
        """Count the tokens that some row of their sequence sees."""
        return len(
            {
                (owner, token)
                for owner, position in self.owners
                for token in range(reference.first_seen(self.shape.kind, self.shape.window, position), position + 1)
            }
        )


def expected_row(
    shape: Shape, q: torch.Tensor, sequence: Sequence, position: int, options: AttentionOptions
) -> torch.Tensor:
    """Return what a row at `position` of `sequence` must get, [H, Dv] f64."""
    seen = slice(reference.first_seen(shape.kind, shape.window, position), position + 1)
    k = shape.stored(sequence.k[seen])
    v = k[..., : shape.widths[1]] if shape.kind == "latent" else shape.stored(sequence.v[seen])
    return reference.attend(q, k, v, options)


def random_sequence(shape: Shape, length: int) -> Sequence:
    """Draw K and V from torch's generator."""
    dtype = FORMATS[shape.dtype].torch_dtype
    k = torch.randn(length, shape.heads[1], shape.widths[0]).to(dtype)
    if shape.kind == "latent":
        return Sequence(k, k[..., : shape.widths[1]])
    return Sequence(k, torch.randn(length, shape.heads[1], shape.widths[1]).to(dtype))


def write(storage: KVStorage, shape: Shape, sequence: Sequence, tokens: range, table: np.ndarray) -> None:
    """Store `tokens` of `sequence` in the blocks of `table`."""
    at = np.arange(tokens.start, tokens.stop)
    slots = torch.from_numpy(table[at // shape.block_size] * shape.block_size + at % shape.block_size)
    k, v = (part[tokens.start : tokens.stop] for part in (sequence.k, sequence.v))
    storage.write(LAYER, k, None if shape.kind == "latent" else v, slots)


def fill_with_nan(storage: KVStorage, blocks: np.ndarray) -> None:
    """Make blocks of all layers look as if they belonged to a sequence that went wrong."""
    for layer in (0, LAYER):
        for pages in storage.pages(layer):
            ids = torch.from_numpy(blocks)
            if pages.scales is not None:
                pages.scales[ids] = torch.nan
                pages.elements.view(torch.uint8)[ids] = 0x7F
            else:
                pages.elements[ids] = torch.nan


def make_step(
    shape: Shape,
    segments: list[tuple[int, int]],
    decodes: list[int],
    *,
    seed: int = 0,
    stale: str = "foreign",
    native: bool = False,
) -> Step:
    """Lay out a step with single rows of sequences of the lengths `decodes`, then `segments` (computed, rows).

    With `native` the batch is one for native attention. `stale` says what stands in a table where no block is needed
    any more or yet: a `foreign` block, or `nothing` (-1).
    """
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    size = shape.block_size
    spans = [(length - 1, length) for length in decodes] + [(done, done + rows) for done, rows in segments]
    needed = [-(-stop // size) for _, stop in spans]
    foreign = 5
    order = rng.permutation(sum(needed) + foreign).astype(np.int64)
    storage = KVStorage([shape.group()], num_blocks=len(order), block_size=size)
    others = order[:foreign]
    fill_with_nan(storage, others)
    sequences, tables, at = [], [], foreign
    for (start, stop), blocks in zip(spans, needed):
        table = order[at : at + blocks].copy()
        at += blocks
        sequence = random_sequence(shape, stop)
        write(storage, shape, sequence, range(stop), table)
        behind = reference.first_seen(shape.kind, shape.window, start) // size
        fill_with_nan(storage, table[:behind])
        table[:behind] = rng.choice(others, behind) if stale == "foreign" else -1
        sequences.append(sequence)
        tables.append(table)
    width = max(needed[: len(decodes)], default=0)
    decode_tables = (
        rng.choice(others, (len(decodes), width)) if stale == "foreign" else np.full((len(decodes), width), -1)
    )
    for row, table in zip(decode_tables, tables):
        row[: len(table)] = table
    runs, owners, row_number = [], [(i, length - 1) for i, length in enumerate(decodes)], len(decodes)
    for i, (start, stop) in enumerate(spans[len(decodes) :], len(decodes)):
        runs.append(Rows(row_number, stop - start, start, tables[i]))
        owners += [(i, position) for position in range(start, stop)]
        row_number += stop - start
    rows = {
        "slot_mapping": np.zeros(row_number, np.int64),
        "segments": runs,
        "decode_lengths": np.array(decodes, np.int64),
        "decode_tables": decode_tables.astype(np.int64),
        "kind": shape.kind,
        "window": shape.window,
    }
    batch = (
        build_native_batch(**rows)
        if native
        else build_attention_batch(**rows, block_size=size, device=torch.device("cpu"))
    )
    q = torch.randn(row_number, shape.heads[0], shape.widths[0]).to(FORMATS[shape.dtype].torch_dtype)
    return Step(shape, q, storage, batch, sequences, owners)
