"""Which decode steps become graphs: the same on every rank, in every order that was asked for."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from moewe.runtime.graphs.ladder import GraphLadder, GraphShape, asked_sizes, graph_sizes, token_classes
from moewe.runtime.plan import StepHeader
from moewe.topologies.exchange_choice import MOST_PADDED_ROWS
from moewe.topologies.exchange_cost import capacity_of

LADDER = GraphLadder(rows=graph_sizes(MOST_PADDED_ROWS), tokens=token_classes(40960), exchange="padded")
DECODE = StepHeader(step=5, epoch=0, kind="decode", bucket=3, exchange="padded")


def header(**changes: object) -> StepHeader:
    return msgspec.structs.replace(DECODE, **changes)


@pytest.mark.parametrize("most", [*range(1, 70), 100, 256, 1000])
def test_sizes_ascend_to_the_most_by_way_of_all_powers_of_two(most: int) -> None:
    sizes = graph_sizes(most)
    assert list(sizes) == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    assert {1 << i for i in range(most.bit_length()) if 1 << i <= most} <= set(sizes)
    assert all(after <= max(2 * before, before + 8) for before, after in pairwise(sizes))
    assert all(4 * after <= 5 * before for before, after in pairwise(sizes) if before >= 32)


def test_a_graph_and_a_step_without_one_make_the_same_room() -> None:
    """A rank that runs a step eagerly beside others that replay it has to send and get as many rows as they do."""
    for bucket in range(1, MOST_PADDED_ROWS + 1):
        rows = LADDER.rows_of(header(bucket=bucket))
        assert rows is not None and rows >= bucket and capacity_of(rows) == capacity_of(bucket)


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({}, 4),
        ({"bucket": 4}, 4),
        ({"kind": "idle", "bucket": 0}, 1),
        ({"bucket": MOST_PADDED_ROWS + 1}, None),
        ({"kind": "prefill"}, None),
        ({"kind": "mixed"}, None),
        ({"exchange": "all_to_all"}, None),
        ({"traced": True}, None),
        ({"snapshot": True}, None),
        ({"overlap": "halves"}, 4),
        ({"counts": True, "step": 7, "placement": 2}, 4),
    ],
)
def test_rows_follow_from_what_all_ranks_know(changes: dict[str, object], rows: int | None) -> None:
    assert LADDER.rows_of(header(**changes)) == rows


def test_tokens_are_a_ranks_own_business() -> None:
    assert LADDER.tokens == (2048, 8192, 32768, 65536)
    assert LADDER.shape_of(4, 0) == LADDER.shape_of(4, 2048) == GraphShape(4, 2048)
    assert LADDER.shape_of(4, 2049) == GraphShape(4, 8192)
    assert LADDER.shape_of(4, 65537) is None
    assert token_classes(1) == (1,) and token_classes(2048) == (2048,)


def test_the_largest_comes_first() -> None:
    shapes = LADDER.shapes
    assert len(shapes) == len(LADDER.rows) * len(LADDER.tokens)
    assert list(shapes) == sorted(shapes, reverse=True)
    assert str(shapes[0]) == "64 rows of up to 65,536 tokens"


def test_shared_experts_run_while_padded_rows_travel_unless_that_is_off() -> None:
    assert LADDER.overlap == "shared"
    assert GraphLadder(rows=(1,), tokens=(8,), exchange="padded", overlaps=False).overlap == "none"
    assert GraphLadder(rows=(1,), tokens=(8,), exchange="local").overlap == "none"


@pytest.mark.parametrize(
    ("asked", "most", "exchange", "expected"),
    [
        ((), None, "local", graph_sizes(200)),
        ((), None, "padded", graph_sizes(MOST_PADDED_ROWS)),
        ((), 10, "local", (1, 2, 4, 8, 10)),
        ((10,), None, "local", (1, 2, 4, 8, 10)),
        ((1000,), None, "local", graph_sizes(200)),
        ((20, 3, 3, 1000), None, "local", (3, 20)),
        ((20, 3), 10, "local", (3,)),
        ((100, 3), None, "padded", (3,)),
        ((300, 400), None, "local", ()),
    ],
)
def test_what_was_asked_for_is_captured(
    asked: tuple[int, ...], most: int | None, exchange: str, expected: tuple[int, ...]
) -> None:
    assert asked_sizes(asked, most, max_num_seqs=200, exchange=exchange) == expected
