"""Moves of experts on one rank: new weights are read aside by a thread, and put in place between two steps.

Not a decision and not when it comes into force (balancer.py): the engine says what to prepare, and the header of a step
which placement holds. One round at a time. Units: bytes, seconds; slots are those of this rank.
L MoE layers, S slots, E experts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from ...models.config import ModelConfig
from ...models.decoder_parts import ExpertChange
from ...models.expert_reader import ExpertReader
from ...models.loading import LoadOptions
from ...native.library import set_threads
from ..messages import DropMoves, MovesPrepared, PrepareMoves
from ..plan import unpack

log = logging.getLogger(__name__)


class MovableExperts(Protocol):
    """What this asks of a model (models/decoder.py)."""

    def slot_tensors(self, moe_layer: int, slot: int) -> list[torch.Tensor]:
        """Return what stands in a slot of this rank."""
        ...

    def move_experts(self, changes: Sequence[ExpertChange], tables: dict[int, torch.Tensor]) -> None:
        """Put other experts into slots, and find experts where they stand now."""
        ...


class RankMoves:
    """The moves of one rank.

    Args:
        model: whose experts move.
        path: of the checkpoint; not read for dummy weights.
        config: of the whole model.
        options: with which it was loaded.

    Attributes:
        placement: number of the placement that holds; 0 is that of the start.

    Raises:
        ConfigError: the checkpoint is not one of this model (any more).
    """

    def __init__(self, model: MovableExperts, path: Path, config: ModelConfig, options: LoadOptions) -> None:
        assert options.placement is not None
        own = slice(*options.placement.slot_ranges[options.rank])
        self.placement = 0
        self._model, self._reader = model, ExpertReader(path, config, options)
        self._moe_layers, self._rank, self._device = config.moe_layers, options.rank, options.device
        self._held = options.placement.physical_to_logical[:, own].copy()  # [L, S], the expert in each slot
        self._thread = ThreadPoolExecutor(1, f"moves-{options.rank}", initializer=set_threads, initargs=(1,))
        self._report: MovesPrepared | None = None  # made by the thread, taken by the rank
        self._asked: PrepareMoves | None = None
        self._changes: list[ExpertChange] = []
        self._prepared = threading.Event()

    def obey(self, message: PrepareMoves | DropMoves) -> None:
        """Begin to prepare a round, or forget it."""
        match message:
            case PrepareMoves():
                if self._asked is not None:
                    raise RuntimeError(f"placement {message.placement} follows {self._asked.placement} too early")
                self._asked = message
                self._prepared.clear()
                self._thread.submit(self._prepare, message)
            case DropMoves():
                self._forget()

    def take_report(self) -> MovesPrepared | None:
        """Return how preparing ended, once."""
        report, self._report = self._report, None
        return report

    def wait(self, timeout: float) -> bool:
        """Wait until what was asked for is prepared; False when it is not after `timeout` seconds."""
        return self._asked is None or self._prepared.wait(timeout)

    def switch(self, placement: int) -> None:
        """Let `placement` hold from now on; nothing happens where it does already.

        Raises:
            RuntimeError: it was not prepared here.
        """
        if placement == self.placement:
            return
        asked = self._asked
        if asked is None or asked.placement != placement or not self._prepared.is_set():
            raise RuntimeError(
                f"placement {placement} is to hold on rank {self._rank}, but {self.placement} does and "
                f"{'none' if asked is None else asked.placement} is being prepared"
            )
        tables = np.reshape(unpack(asked.tables), (len(asked.layers), -1))
        dropped = np.full((len(tables), 1), -1, np.int32)  # where a dropped choice is looked up
        made = torch.from_numpy(np.concatenate([tables, dropped], axis=1)).to(self._device)
        self._model.move_experts(self._changes, dict(zip(asked.layers, made)))
        for layer, slot, expert in _moves(asked):
            self._held[layer, slot] = expert
        self.placement = placement
        self._forget()

    def close(self) -> None:
        """End the thread, when it has read what it reads, and close the checkpoint."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._forget()
        self._reader.close()

    def _forget(self) -> None:
        self._asked, self._changes = None, []
        self._prepared.clear()

    # --- the thread --------------------------------------------------------------------------------------------------
    def _prepare(self, message: PrepareMoves) -> None:
        begun, error = time.perf_counter(), ""
        changes: list[ExpertChange] = []
        try:
            for layer, slot, expert in _moves(message):
                changes.append(ExpertChange(moe_layer=layer, slot=slot, tensors=self._fetch(layer, expert)))
        except Exception as problem:
            log.warning("rank %d cannot prepare placement %d", self._rank, message.placement, exc_info=problem)
            error = f"{type(problem).__name__}: {problem}"
            changes = []
        self._changes = changes
        self._report = MovesPrepared(
            rank=self._rank, placement=message.placement, error=error, seconds=time.perf_counter() - begun
        )
        self._prepared.set()

    def _fetch(self, layer: int, expert: int) -> list[torch.Tensor]:
        """Return the weights of an expert in memory of their own: of a slot of this rank, or as they are stored."""
        own = np.flatnonzero(self._held[layer] == expert)
        if own.size:
            return [part.clone() for part in self._model.slot_tensors(layer, int(own[0]))]
        return self._reader.read(self._moe_layers[layer], expert).slot_tensors(0)


def _moves(message: PrepareMoves) -> list[tuple[int, int, int]]:
    """Return (MoE layer, slot of this rank, expert) of each move."""
    return [(layer, slot, expert) for layer, slot, expert in unpack(message.moves).reshape(-1, 3).tolist()]
