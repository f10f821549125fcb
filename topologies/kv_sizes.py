"""How many KV blocks each cache group of a rank gets, and how far they reach: pure functions, the only place for it.

Not an allocator and not storage. Budget, start-up, ranks and scheduler all ask here, so they cannot disagree.
Units: tokens, blocks, bytes of one rank. "N" is the number of blocks of a group that keeps whole sequences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

WINDOWED = ("window", "chunk")


@dataclass(frozen=True, kw_only=True)
class KVGroup:
    """What sizes depend on of a cache group (kvcache/groups.py describes the whole of it).

    Attributes:
        name: unique among the groups of a model.
        kind, window: as in `CacheGroup`.
        bytes_per_token: of one token of one sequence over all layers of the group.
        num_heads: KV heads that these bytes are of, which ranks may divide; 1 for a latent, which each of them holds.
    """

    name: str
    kind: str
    bytes_per_token: int
    window: int = 0
    num_heads: int = 1


def shared_groups(groups: Sequence[KVGroup], atp: int) -> tuple[KVGroup, ...]:
    """Return `groups` as one of `atp` ranks holds them: its part of the KV heads, at least one of each group.

    Example:
        >>> group = KVGroup(name="full", kind="full", bytes_per_token=8, num_heads=2)
        >>> [own.bytes_per_token for own in shared_groups([group], 4)]
        [4]
    """
    shared = []
    for group in groups:
        num_heads = -(-group.num_heads // atp)
        num_bytes = group.bytes_per_token // group.num_heads * num_heads
        shared.append(replace(group, bytes_per_token=num_bytes, num_heads=num_heads))
    return tuple(shared)


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """What bounds a step and a sequence, in tokens: the part of the engine's options that costs bytes.

    `moves_experts` says that ranks hold experts aside while these move, `graph_bytes` what CUDA graphs of a rank take,
    `has_tables` that block tables stand in memory of a rank's device.
    """

    max_num_batched_tokens: int
    max_model_len: int
    max_num_seqs: int
    block_size: int
    moves_experts: bool = False
    graph_bytes: int = 0
    has_tables: bool = False


def decode_rows_bytes(most_rows: int, num_groups: int, max_blocks: int) -> int:
    """Return the bytes on a GPU of block tables and numbers of steps of single rows, which never move.

    Args:
        most_rows: of such a step.
        num_groups: cache groups.
        max_blocks: of a sequence.
    """
    room = -(-most_rows // 2) * 2  # numbers of a row are 7 and its slot in each group, in parts of 16 bytes
    numbers = 2 + (7 + num_groups) * room
    return 8 * numbers + 4 * num_groups * (most_rows * max_blocks // 4 * 4 + 4)


def table_bytes(num_groups: int, limits: StepLimits) -> int:
    """Return the bytes on a GPU of block tables: of single rows, and for a moment of those mixed with prompts."""
    width = -(-limits.max_model_len // limits.block_size)
    mixture = 4 * num_groups * limits.max_num_seqs * width
    return decode_rows_bytes(limits.max_num_seqs, num_groups, width) + mixture


def sequence_blocks(kind: str, window: int, num_tokens: int, block_size: int) -> int:
    """Return the most blocks that a sequence of `num_tokens` tokens in KV needs at once, run row by row.

    A windowed group keeps the blocks from the first that the next row sees; where in a block the window begins is
    the worst case for `window`, and of the places that multiples of the run can have for `chunk`.

    Example:
        >>> [sequence_blocks(kind, 8, 100, 4) for kind in ("full", "window", "chunk")]
        [25, 3, 2]
    """
    blocks = -(-num_tokens // block_size)
    if kind not in WINDOWED:
        return blocks
    offset = block_size - (1 if kind == "window" else math.gcd(window, block_size))
    return min(blocks, (offset + window - 1) // block_size + 1)


def tokens_held(kind: str, window: int, num_blocks: int, *, block_size: int, at_most: int) -> int:
    """Return how many tokens a sequence that is alone can have in KV, up to `at_most`, with `num_blocks` blocks."""
    if sequence_blocks(kind, window, at_most, block_size) <= num_blocks:
        return at_most
    return num_blocks * block_size


def useful_blocks(group: KVGroup, limits: StepLimits) -> int:
    """Return the number of blocks beyond which more would never be used.

    In a windowed group the rows of a step come on top of the windows: a chunk is written before what it leaves behind
    is freed.
    """
    whole = limits.max_num_seqs * sequence_blocks("full", 0, limits.max_model_len, limits.block_size)
    if group.kind not in WINDOWED:
        return whole
    window = sequence_blocks(group.kind, group.window, limits.max_model_len, limits.block_size)
    rows = limits.max_num_batched_tokens // limits.block_size + limits.max_num_seqs  # each chunk may begin a block
    return min(whole, limits.max_num_seqs * window + rows)


def group_blocks(groups: Sequence[KVGroup], limits: StepLimits, num_blocks: int) -> tuple[int, ...]:
    """Return the blocks of each group when those that keep whole sequences get `num_blocks`."""
    return tuple(
        min(num_blocks, useful_blocks(group, limits)) if group.kind in WINDOWED else num_blocks for group in groups
    )


def kv_bytes(groups: Sequence[KVGroup], limits: StepLimits, num_blocks: int) -> int:
    """Return the exact KV bytes of a rank with `group_blocks(..., num_blocks)`."""
    blocks = group_blocks(groups, limits, num_blocks)
    return sum(n * group.bytes_per_token * limits.block_size for n, group in zip(blocks, groups, strict=True))


def most_useful(groups: Sequence[KVGroup], limits: StepLimits) -> int:
    """Return the N beyond which no group has a use for more."""
    return max(useful_blocks(group, limits) for group in groups)


def blocks_in(groups: Sequence[KVGroup], limits: StepLimits, num_bytes: int) -> int:
    """Return the largest N whose KV takes at most `num_bytes`; no more than is useful where all groups are windowed."""
    whole = [group.bytes_per_token for group in groups if group.kind not in WINDOWED]
    fewest = 0
    most = max(0, num_bytes) // (sum(whole) * limits.block_size) if any(whole) else most_useful(groups, limits)
    while fewest < most:
        middle = (fewest + most + 1) // 2
        if kv_bytes(groups, limits, middle) <= num_bytes:
            fewest = middle
        else:
            most = middle - 1
    return fewest


def blocks_to_hold(groups: Sequence[KVGroup], limits: StepLimits) -> int:
    """Return the least N with which one sequence of `max_model_len` tokens runs."""
    return max(sequence_blocks(g.kind, g.window, limits.max_model_len, limits.block_size) for g in groups)


def modest_kv_bytes(groups: Sequence[KVGroup], limits: StepLimits, share: int) -> int:
    """Return the bytes of KV that a rank of a host takes at most unasked: its `share`, or what one sequence needs."""
    return max(share, kv_bytes(groups, limits, blocks_to_hold(groups, limits)))


def longest_sequence(groups: Sequence[KVGroup], limits: StepLimits, num_blocks: int) -> int:
    """Return the longest sequence that N = `num_blocks` holds, prompt and output, at most `max_model_len` tokens."""
    blocks = group_blocks(groups, limits, num_blocks)
    return min(
        tokens_held(group.kind, group.window, n, block_size=limits.block_size, at_most=limits.max_model_len)
        for n, group in zip(blocks, groups, strict=True)
    )


def max_concurrency(groups: Sequence[KVGroup], limits: StepLimits, num_blocks: int, num_tokens: int) -> int:
    """Return how many sequences of `num_tokens` tokens fit a rank at once."""
    blocks = group_blocks(groups, limits, num_blocks)
    return min(
        n // sequence_blocks(group.kind, group.window, num_tokens, limits.block_size)
        for n, group in zip(blocks, groups, strict=True)
    )


def sequences_held(groups: Sequence[KVGroup], limits: StepLimits, blocks: Sequence[int], lengths: Sequence[int]) -> int:
    """Return how many sequences of these lengths fit at once, the shortest first, with `blocks` of each group.

    Example:
        >>> limits = StepLimits(max_num_batched_tokens=8, max_model_len=64, max_num_seqs=8, block_size=4)
        >>> sequences_held([KVGroup(name="full", kind="full", bytes_per_token=8)], limits, [5], [9, 4, 8])
        2
    """
    used = [0] * len(groups)
    for number, length in enumerate(sorted(lengths)):
        for i, group in enumerate(groups):
            used[i] += sequence_blocks(group.kind, group.window, length, limits.block_size)
        if any(have < need for have, need in zip(blocks, used, strict=True)):
            return number
    return len(lengths)
