"""Layers in one native call over shared memory: what the exchange cannot take ends the step with an error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from moewe.moe.wide_ep import ShmExchange, ShmShape, linear_placement
from moewe.runtime.ranks.warm_up import WARM_UP_TOKENS
from moewe.runtime.worker import Worker
from moewe.telemetry import ProgressBoard
from moewe.topologies.host_memory import create_memory
from tests.support.fixtures import checkpoint
from tests.support.native import needs_native
from tests.support.setups import Setup

pytestmark = needs_native


@contextmanager
def loaded_worker(*, capacity: int, num_slots: int) -> Iterator[Worker]:
    """A lone rank with the 8 experts of a layer, over an exchange that was made for so many slots and tokens."""
    path = checkpoint("T-QW3", dtype="bfloat16")
    config = Setup(dtype="bfloat16").engine_config(path)
    shape = ShmShape(slot_ranges=((0, num_slots),), capacity=capacity, top_k=2, width=64, dtype=torch.bfloat16)
    fd = create_memory("exchange", shape.offsets()[-1])
    try:
        worker = Worker(
            config,
            rank=0,
            num_ranks=1,
            exchange=ShmExchange(fd, shape, 0),
            placement=linear_placement(2, 8, 1),
            progress=ProgressBoard(1).rank(0),
            on_loading=lambda done, total: None,
        )
        worker.load()
        worker.allocate(16)
        yield worker
    finally:
        os.close(fd)


def test_what_fits_runs() -> None:
    with loaded_worker(capacity=WARM_UP_TOKENS, num_slots=8) as worker:
        worker.warm_up()
        native = worker.decoder._native
        assert native is not None and native.whole and native.tokens_per_slot.sum() == 2 * 2  # of one decoded row


def test_more_tokens_than_there_is_room_for() -> None:
    with (
        loaded_worker(capacity=WARM_UP_TOKENS - 1, num_slots=8) as worker,
        pytest.raises(RuntimeError, match=r"8 tokens on rank 0; .* max_num_batched_tokens=7"),
    ):
        worker.warm_up()


def test_a_choice_that_names_no_slot() -> None:
    with (
        loaded_worker(capacity=WARM_UP_TOKENS, num_slots=1) as worker,
        pytest.raises(RuntimeError, match=r"physical id [1-7] of rank 0 names no expert slot; there are 1$"),
    ):
        worker.warm_up()
