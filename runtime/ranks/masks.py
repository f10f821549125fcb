"""Packed token masks: which tokens a row may take, one bit a token, laid over its logits.

Not a grammar (who makes a mask knows why) and not a sampler. Rows without a mask are not touched.
Shapes: N rows of logits [N, V] f32, M of them with a mask; words are u32 [M, ceil(V / 32)], see `TokenMask`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..plan import TokenMask
from .host_memory import Send

BITS = 32


def num_words(vocab: int) -> int:
    """Return the words of a mask over `vocab` tokens."""
    return -(-vocab // BITS)


def pack_mask(allowed: np.ndarray) -> bytes:
    """Return the words of a mask that allows token i where `allowed[i]`, [V] bool."""
    padded = np.zeros(num_words(allowed.size) * BITS, np.bool_)
    padded[: allowed.size] = allowed
    return np.packbits(padded, bitorder="little").tobytes()


def masked_rows(masks: Sequence[TokenMask], slots: np.ndarray, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which rows have a mask, [M] i64, and their words, [M, ceil(V / 32)] u32; `slots` [N] are the rows' slots.

    Raises:
        RuntimeError: a mask is made for another vocabulary.
    """
    rows, words = [], []
    places = {slot: row for row, slot in enumerate(slots.tolist())}
    for mask in masks:
        if len(mask.words) != 4 * num_words(vocab):
            raise RuntimeError(
                f"the mask of slot {mask.slot} has {len(mask.words)} bytes, but {vocab} tokens take "
                f"{4 * num_words(vocab)}"
            )
        if mask.slot in places:  # else the sequence ended meanwhile
            rows.append(places[mask.slot])
            words.append(np.frombuffer(mask.words, "<u4"))
    return np.array(rows, np.int64), np.array(words, np.uint32).reshape(len(rows), num_words(vocab))


def forbidden(words: np.ndarray, vocab: int, send: Send) -> torch.Tensor:
    """Return which tokens each mask forbids, [M, V] bool, where `send` takes the words."""
    packed = send(words.view(np.int32))
    bits = (packed[:, :, None] >> torch.arange(BITS, dtype=torch.int32, device=packed.device)) & 1
    return bits.view(len(words), -1)[:, :vocab] == 0
