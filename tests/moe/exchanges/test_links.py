"""Links between threads, and the one that is slowed down: on a clock of its own, nothing waits."""

from __future__ import annotations

import pytest
import torch

from moewe.moe.wide_ep.exchanges import links
from moewe.moe.wide_ep.exchanges.group_shape import GroupShape, SlowRate
from moewe.moe.wide_ep.exchanges.links import LoneLink, SlowLink, swap, swap_counts
from moewe.moe.wide_ep.exchanges.thread_links import ThreadMeetings
from moewe.telemetry import ProgressBoard
from tests.support.rank_calls import call_ranks


class Clock:
    """Time that passes only in `sleep`."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


class Mirror:
    """A link of `size` members that sends back what it is given, as if all others did the same."""

    def __init__(self, size: int) -> None:
        self.size, self.index, self.held_bytes = size, 0, 7

    def start(self, rows: torch.Tensor, sent: list[int], received: list[int], **_: bool) -> links.Pending:
        return lambda: rows

    def gather(self, rows: torch.Tensor) -> links.Pending:
        return lambda: rows.repeat(self.size, 1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(links, "time", clock)
    return clock


RATE = SlowRate(megabytes_per_second=2, delay_us=500)
ROWS = torch.zeros(10, 100, dtype=torch.uint8)


def test_a_slow_link_takes_delay_and_bytes_over_rate(clock: Clock) -> None:
    board = ProgressBoard(1)
    slow = SlowLink(Mirror(3), [False, True, True], RATE, board.rank(0))
    swap(slow, ROWS, [2, 4, 4], [2, 4, 4])
    assert clock.now == pytest.approx(500e-6 + 800 / 2e6)
    assert board.snapshot()[0, 1] > 0, "a rank that waits for a link shows signs of life"
    clock.now = 1.0
    slow.gather(ROWS)()
    assert clock.now == pytest.approx(1.0 + 500e-6 + 2 * 1000 / 2e6)


def test_what_is_done_meanwhile_hides_a_slow_link(clock: Clock) -> None:
    slow = SlowLink(Mirror(2), [False, True], RATE)
    pending = slow.start(ROWS, [0, 10], [0, 10])
    clock.sleep(0.3)
    pending()
    assert clock.now == 0.3


def test_what_is_under_way_at_a_time_shares_the_rate(clock: Clock) -> None:
    """Bytes leave one after another and the delay passes for all of them at once, so two halves take what one takes."""
    slow = SlowLink(Mirror(2), [False, True], RATE)
    first, second = (slow.start(ROWS, [5, 5], [5, 5]) for _ in range(2))
    third = slow.gather(ROWS)
    second()
    assert clock.now == pytest.approx(500e-6 + 1000 / 2e6)
    first()
    assert clock.now == pytest.approx(500e-6 + 1000 / 2e6)
    third()
    assert clock.now == pytest.approx(500e-6 + 2000 / 2e6)
    clock.now = 7.0
    swap(slow, ROWS, [0, 0], [0, 0])
    assert clock.now == pytest.approx(7.0 + 500e-6)


def test_neighbours_are_not_slowed(clock: Clock) -> None:
    swap(SlowLink(Mirror(2), [False, False], RATE), ROWS, [5, 5], [5, 5])
    assert clock.now == 0.0


def test_rows_and_counts_find_their_members() -> None:
    meetings = ThreadMeetings(timeout_s=30)

    def work(rank: int) -> None:
        link = meetings.link(range(3), rank)
        for turn in range(50):
            sent = [(rank + to + turn) % 3 for to in range(3)]
            received = swap_counts(link, sent, torch.device("cpu"))
            assert received == [(source + rank + turn) % 3 for source in range(3)]
            rows = torch.tensor([[rank, to] for to in range(3) for _ in range(sent[to])], dtype=torch.uint8)
            arrived = swap(link, rows.view(-1, 2), sent, received)
            assert arrived.tolist() == [[source, rank] for source in range(3) for _ in range(received[source])]
            assert link.gather(rows.new_full((1, 1), rank))().tolist() == [[0], [1], [2]]

    call_ranks(3, work, meetings.abort)


def test_alone_there_is_nobody_to_ask() -> None:
    link = LoneLink()
    assert swap_counts(link, [7], torch.device("cpu")) == [7]
    assert swap(link, ROWS, [10], [10]) is ROWS and link.gather(ROWS)() is ROWS


def test_rails_join_places_of_all_domains() -> None:
    shape = GroupShape(slot_ranges=tuple((i, i + 1) for i in range(7)), domain_sizes=(4, 3))
    assert shape.domains == ((0, 1, 2, 3), (4, 5, 6)) and shape.domain_of == (0, 0, 0, 0, 1, 1, 1)
    assert shape.rails == ((0, 3, 4), (1, 5), (2, 6))
    assert [shape.rail_of(rank) for rank in range(7)] == [0, 1, 2, 0, 0, 1, 2]
    assert shape.relays(0) == (0, 4) and shape.relays(2) == (2, 6)
    assert shape.scopes(5) == [2, 2, 2, 2, 1, 0, 1]


def test_a_link_knows_the_most_that_it_held_at_a_time() -> None:
    meetings = ThreadMeetings()
    made = [meetings.link((0, 1), rank) for rank in (0, 1)]

    def meet(rank: int) -> int:
        link = made[rank]
        swap(link, ROWS[: 3 + rank], [1, 2 + rank], [1, 1] if rank == 0 else [2, 3])
        largest = link.held_bytes
        link.gather(ROWS[:1])()
        assert link.held_bytes == largest
        return largest

    assert call_ranks(2, meet, meetings.abort) == [(3 + 2) * 100, (4 + 5) * 100]
    assert SlowLink(Mirror(2), [False, True], RATE).held_bytes == 7 and LoneLink().held_bytes == 0
