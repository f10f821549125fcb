"""Which decode steps are captured as CUDA graphs, and which of them a step takes: pure functions, and one small record.

Not the capturing (capture.py) and nothing of a device. What all ranks must agree on, the rows, is a function of the
header alone; how far attention looks, the tokens, is each rank's own business, because nothing of it crosses a link.
Units: rows of one rank, tokens of a sequence.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from ...topologies.exchange_choice import MOST_PADDED_ROWS
from ...topologies.overlap_choice import NOTHING, SHARED
from ..plan import StepHeader

_STEP_ROWS = 8  # between sizes, at first
_SIZES_A_DOUBLING = 4  # from 32 rows on at most a fifth of those that run stands for nothing
_FIRST_TOKENS, _TOKENS_FACTOR = 2048, 4
_KINDS = ("decode", "idle")


def graph_sizes(most: int) -> tuple[int, ...]:
    """Return numbers of rows to capture, up to `most` itself; every power of two below it is among them.

    Example:
        >>> graph_sizes(40)
        (1, 2, 4, 8, 16, 24, 32, 40)
        >>> graph_sizes(160)[-6:]
        (64, 80, 96, 112, 128, 160)
    """
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        if size < _STEP_ROWS:
            size *= 2
        else:
            size += max(_STEP_ROWS, (1 << (size.bit_length() - 1)) // _SIZES_A_DOUBLING)
    return (*sizes, most)


def asked_sizes(asked: Sequence[int], most_asked: int | None, *, max_num_seqs: int, exchange: str) -> tuple[int, ...]:
    """Return the rows to capture, ascending.

    Args:
        asked: as the user gave them: none, one (all up to it), or a list.
        most_asked: no more rows than this.
        max_num_seqs: no step has more rows.
        exchange: of decode steps; `padded` has its own limit.

    Example:
        >>> asked_sizes((), None, max_num_seqs=12, exchange="local"), asked_sizes((6,), None, max_num_seqs=12,
        ...     exchange="local"), asked_sizes((9, 3), 8, max_num_seqs=12, exchange="local")
        ((1, 2, 4, 8, 12), (1, 2, 4, 6), (3,))
    """
    most = min(max_num_seqs, most_asked or max_num_seqs, MOST_PADDED_ROWS if exchange == "padded" else max_num_seqs)
    if len(asked) > 1:
        return tuple(sorted({size for size in asked if size <= most}))
    return graph_sizes(min([most, *asked]))


def token_classes(max_model_len: int) -> tuple[int, ...]:
    """Return the lengths of sequences that graphs are captured for, powers of two, up to one that holds them all.

    Attention's grid has a program for each part of the longest sequence that may be there, so that one graph for all
    lengths would start many that find nothing.

    Example:
        >>> token_classes(40960), token_classes(1000)
        ((2048, 8192, 32768, 65536), (1024,))
    """
    last = 1 << max(0, max_model_len - 1).bit_length()
    classes, tokens = [], _FIRST_TOKENS
    while tokens < last:
        classes.append(tokens)
        tokens *= _TOKENS_FACTOR
    return (*classes, last)


@dataclass(frozen=True, order=True)
class GraphShape:
    """What one graph is captured for: so many rows, each of a sequence of up to so many tokens."""

    rows: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.rows} rows of up to {self.tokens:,} tokens"


@dataclass(frozen=True, kw_only=True)
class GraphLadder:
    """All shapes of a rank; the same on all ranks of a group.

    Attributes:
        rows, tokens: ascending; every pair of them is a shape.
        exchange: of the steps that are captured.
        overlaps: shared experts run while rows travel.
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    exchange: str
    overlaps: bool = True

    @property
    def shapes(self) -> tuple[GraphShape, ...]:
        """In the order of capturing: the largest first, so that all others find room in what it took."""
        return tuple(GraphShape(rows, tokens) for rows in reversed(self.rows) for tokens in reversed(self.tokens))

    @property
    def overlap(self) -> str:
        """What runs while rows travel, in graphs and in steps that stand in for one; names as in a header."""
        return SHARED if self.overlaps and self.exchange == "padded" else NOTHING

    def rows_of(self, header: StepHeader) -> int | None:
        """Return how many rows every rank runs in a step, filled or not; None: as many as it has, without a graph.

        Nothing but the header counts, so ranks agree. Traced steps are looked at part by part; a snapshot has chunks.
        """
        if header.kind not in _KINDS or header.traced or header.snapshot or header.exchange != self.exchange:
            return None
        at = bisect_left(self.rows, header.bucket)
        return self.rows[at] if at < len(self.rows) else None

    def shape_of(self, rows: int, longest: int) -> GraphShape | None:
        """Return the shape for `rows` and a longest sequence of `longest` tokens; None where none is long enough."""
        at = bisect_left(self.tokens, longest)
        return GraphShape(rows, self.tokens[at]) if at < len(self.tokens) else None
