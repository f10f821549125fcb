"""What comes back from a device: all of it with one wait, into memory that stays. What goes there: without any wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from moewe.attention.kernels.step import GpuStep
from moewe.runtime.plan import Admission, Chunk, RankPlan, SamplingState, pack
from moewe.runtime.ranks.batch import StepRows, WorkerBatch
from moewe.runtime.ranks.host_memory import Fetcher, Sender, pinned
from moewe.runtime.ranks.step_inputs import InputBuilder, StepInputs
from tests.support.numerics import assert_same

CPU = torch.device("cpu")
PROMPT, BLOCK, SLOTS, TILE = 5, 4, 3, 2


class LateDevice:
    """Copies what it is told to only when somebody waits for it, and no more than that."""

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.num_done = 0
        self.rooms: list[torch.Tensor] = []

    def sender(self) -> Sender:
        return Sender(CPU, room=self._room, mark=self._mark, copy=lambda *pair: self._copies.append(pair))

    @property
    def num_sent(self) -> int:
        return len(self._copies)

    def run(self, until: int | None = None) -> None:
        until = len(self._copies) if until is None else until
        for place, source in self._copies[self.num_done : until]:
            place.copy_(source)
        self.num_done = max(self.num_done, until)

    def _room(self, num_bytes: int) -> torch.Tensor:
        self.rooms.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return self.rooms[-1]

    def _mark(self) -> Callable[[], None]:
        number = len(self._copies)
        return lambda: self.run(number)


def test_several_tensors_come_with_one_wait() -> None:
    waits, rooms = [], []

    def room(num_bytes: int) -> torch.Tensor:
        rooms.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    fetch = Fetcher(CPU, room=room, wait=lambda: waits.append(1))
    best, finite, none = torch.tensor([5, -1, 7]), torch.tensor([True, False, True]), torch.empty(0, 2)
    for _ in range(2):
        found = fetch(best, finite, none, best.float())
        np.testing.assert_array_equal(found[0], [5, -1, 7])
        assert found[1].tolist() == [True, False, True] and found[2].shape == (0, 2) and found[3].dtype == np.float32
    assert len(waits) == 2 and len(rooms) == 1, "a wait a call, and room once"
    assert len(fetch(torch.arange(1000))[0]) == 1000 and len(rooms) == 2


def test_on_a_cpu_nothing_is_copied() -> None:
    numbers = torch.arange(3)
    (found,) = Fetcher(CPU)(numbers)
    numbers[0] = 9
    assert found[0] == 9
    assert not pinned((2, 3), torch.int64, CPU).is_pinned()


def test_what_is_sent_stays_until_it_was_read() -> None:
    device = LateDevice()
    send = device.sender()
    send.begin()
    array = np.arange(3)
    first, second = send(array), send(np.array([True, False]))
    array[:] = -1  # it was handed over
    third = send(np.arange(100.0))  # more than there was room for
    send.end()
    late, place = send(np.arange(5)), torch.zeros(2, 3)
    send.into(place[:, :2], np.arange(8.0, dtype=np.float32).reshape(2, 4)[:, 1:3])
    assert device.num_done == 0, "nobody waits"
    send.begin()
    assert device.num_done == 5, "before anything is written over it, and what was sent late as well"
    again = send(np.arange(50))
    assert first.tolist() == [0, 1, 2] and second.tolist() == [True, False] and third[99] == 99.0
    assert late.tolist() == [0, 1, 2, 3, 4] and place.tolist() == [[1.0, 2.0, 0.0], [5.0, 6.0, 0.0]]
    device.run()
    assert again.tolist() == list(range(50)) and len(device.rooms) == 2


def test_inputs_of_a_step_reach_a_device_that_is_late() -> None:
    """Prompts, steps of single rows, a mixture, and others who decode: what is on the device is what was sent."""
    batches = [WorkerBatch(num_slots=SLOTS, max_model_len=40, block_size=BLOCK, groups=GROUPS) for _ in range(2)]
    device = LateDevice()
    late, prompt = (InputBuilder(batch, CPU, 0, gpu=True) for batch in batches)
    late.send = device.sender()
    assert late._fixed is not None
    late._fixed._copy = late.send.into
    before: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None
    for plan in PLANS:
        rows = [_rows(batch, plan) for batch in batches]
        found = late.of(rows[0])
        sent, kinds = _tensors(found), len(found.rows.segments)  # its first layer asks for tiles
        if before is None:
            assert device.num_sent == 3 + len(GROUPS) * 4, "nothing of a prompt goes another way"
        else:
            for own, expected in zip(*before, strict=True):
                assert_same(own, expected)
        before = sent, [tensor.clone() for tensor in _tensors(prompt.of(rows[1]))]
        assert late.send._read is not None and kinds == len(plan.chunks)
        for batch, own in zip(batches, rows, strict=True):
            batch.commit(own, np.full(own.sample_slots.size, 7))
    assert device.num_done > 0


GROUPS = (("full", 0), ("window", 6))


def _admission(slot: int) -> Admission:
    sampling = SamplingState(temperature=0.0, top_p=1.0, top_k=0, seed=0, num_logprobs=-1, eos_token_ids=())
    tokens = pack(np.arange(PROMPT) + 10 * slot)
    return Admission(slot=slot, sequence_id=slot, tokens=tokens, max_length=40, sampling=sampling)


def _plan(new: Sequence[int], num_decodes: int) -> RankPlan:
    """Run the prompts of `new` slots, which get all blocks that they will ever need."""
    grants = [(group, slot, i, 10 * slot + i) for group in range(len(GROUPS)) for slot in new for i in range(10)]
    return RankPlan(
        admitted=tuple(map(_admission, new)),
        grants=pack(np.array(grants)) if grants else b"",
        chunks=tuple(Chunk(slot=slot, start=0, num_tokens=PROMPT, samples=True) for slot in new),
        num_decodes=num_decodes,
    )


PLANS = [_plan([0, 1], 0), _plan([], 2), _plan([], 2), _plan([2], 2), _plan([], 3), _plan([], 3), _plan([], 3)]


def _rows(batch: WorkerBatch, plan: RankPlan) -> StepRows:
    batch.apply(plan)
    return batch.rows(plan.chunks, plan.held)


def _tensors(inputs: StepInputs) -> list[torch.Tensor]:
    forward = inputs.forward
    found = [forward.input_ids, forward.positions, forward.sample_rows]
    for own in forward.attention:
        step = own.gpu
        assert isinstance(step, GpuStep)
        found += [own.slot_mapping, step.runs, step.tables, step.tiles(TILE)]
    return found
