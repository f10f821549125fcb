"""What comes back from a device: all of it with one wait, into memory that stays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from moewe.runtime.ranks.host_memory import Fetcher, Sender, pinned


def test_several_tensors_come_with_one_wait() -> None:
    waits, rooms = [], []

    def room(num_bytes: int) -> torch.Tensor:
        rooms.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    fetch = Fetcher(torch.device("cpu"), room=room, wait=lambda: waits.append(1))
    best, finite, none = torch.tensor([5, -1, 7]), torch.tensor([True, False, True]), torch.empty(0, 2)
    for _ in range(2):
        found = fetch(best, finite, none, best.float())
        np.testing.assert_array_equal(found[0], [5, -1, 7])
        assert found[1].tolist() == [True, False, True] and found[2].shape == (0, 2) and found[3].dtype == np.float32
    assert len(waits) == 2 and len(rooms) == 1, "a wait a call, and room once"
    assert len(fetch(torch.arange(1000))[0]) == 1000 and len(rooms) == 2


def test_on_a_cpu_nothing_is_copied() -> None:
    numbers = torch.arange(3)
    (found,) = Fetcher(torch.device("cpu"))(numbers)
    numbers[0] = 9
    assert found[0] == 9
    assert not pinned((2, 3), torch.int64, torch.device("cpu")).is_pinned()


def test_what_is_sent_stays_until_it_was_read() -> None:
    events: list[str] = []
    rooms: list[torch.Tensor] = []

    def room(num_bytes: int) -> torch.Tensor:
        rooms.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return rooms[-1]

    def mark() -> Callable[[], None]:
        events.append("sent")
        return lambda: events.append("read")

    send = Sender(torch.device("cpu"), room=room, mark=mark)
    send.begin()
    first, second = send(np.arange(3)), send(np.array([True, False]))
    third = send(np.arange(100.0))  # more than there was room for
    assert first.tolist() == [0, 1, 2] and second.tolist() == [True, False] and third[99] == 99.0
    send.end()
    assert events == ["sent"]
    send.begin()
    assert events == ["sent", "read"], "before anything is written over it"
    again = send(np.arange(50))
    assert again.data_ptr() == rooms[-1].data_ptr() and len(rooms) == 2
