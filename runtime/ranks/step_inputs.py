"""From the rows of a step, in numpy, to what the decoder and the sampler are handed.

Not the rows (batch.py). Where the same sequences decode step after step, the same tensors, batches and settings come
back, and only numbers in them have changed: nothing is made anew.
Shapes: T rows of the step, K of them sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import repeat

import numpy as np
import torch

from ...attention.batch import AttentionBatch
from ...attention.build import NativeDecodes, build_attention_batch, build_gpu_batch, build_native_batch
from ...attention.kernels.decode_rows import DecodeRows
from ...models.forward_batch import ForwardBatch
from ..plan import pack
from .batch import GroupRows, StepRows, WorkerBatch
from .host_memory import Sender
from .sampler import SamplingRows


@dataclass(frozen=True, kw_only=True, eq=False)
class StepInputs:
    """A step, ready to run.

    Attributes:
        rows: what it was made of.
        forward: for the decoder.
        samples_all: every row is sampled, in order.
        takes_best: nobody asks for more than the most likely token: no chance, no edits, no log-probabilities.
        slots, sequence_ids: `rows.sample_slots` and their sequences as a result names them.
    """

    rows: StepRows
    forward: ForwardBatch
    samples_all: bool
    takes_best: bool
    slots: bytes
    sequence_ids: bytes


class InputBuilder:
    """Makes the inputs of one rank's steps.

    Args:
        batch: of the rank.
        device: of its tensors.
        long_from: sequences that may grow beyond so many tokens use other rotary frequencies; 0 where none do.
        native: a CPU's kernels attend.
        gpu: kernels of a GPU do.
        divides_heads: ranks that divide heads have the same rows.

    Attributes:
        pad_to: how many rows a step of so many single rows has; with `gpu` alone. By default as many.
        send: takes arrays to the device, those of inputs and whatever else the step needs there until the next one.
    """

    def __init__(
        self,
        batch: WorkerBatch,
        device: torch.device,
        long_from: int,
        *,
        native: bool = False,
        gpu: bool = False,
        divides_heads: bool = False,
    ) -> None:
        self._batch, self._device, self._long_from = batch, device, long_from
        self.send = Sender(device)
        self._is_native, self._is_gpu = native, gpu
        self._fixed: DecodeRows | None = None
        self.pad_to: Callable[[int], int] = lambda num_rows: num_rows
        if gpu and not divides_heads:
            self._fixed = DecodeRows(
                most_rows=batch.num_slots,
                groups=batch.groups,
                max_blocks=batch.max_blocks,
                block_size=batch.block_size,
                device=device,
                copy=self.send.into,
            )
        self._last: StepInputs | None = None
        self._decodes: list[NativeDecodes] = []
        self._settings: SamplingRows | None = None

    def of(self, rows: StepRows) -> StepInputs:
        """Return the inputs of a step of `rows`, which hold until the next call."""
        if self._last is not None and self._last.rows is rows and self._is_native:
            for decodes in self._decodes:
                decodes.advance()
            return self._last
        fixed = None if rows.segments else self._fixed
        if fixed is not None and self._last is not None and self._last.rows is rows:
            self.send.begin()
            self._last = replace(self._last, forward=self._forward_fixed(fixed, rows, self._last.forward.sample_rows))
            self.send.end()
            return self._last
        self._settings = None
        self._decodes = []
        self.send.begin()
        if fixed is not None:
            fixed.load_tables([group.decode_tables for group in rows.groups])
        self._last = StepInputs(
            rows=rows,
            forward=self._forward(rows)
            if fixed is None
            else self._forward_fixed(fixed, rows, self.send(rows.sample_rows)),
            samples_all=rows.sample_rows.size == rows.num_rows,
            takes_best=self._batch.sampling.takes_best(rows.sample_slots),
            slots=pack(rows.sample_slots),
            sequence_ids=pack(self._batch.sequence_ids[rows.sample_slots], "<i8"),
        )
        self.send.end()
        return self._last

    @property
    def why_not_captured(self) -> str | None:
        """Why decode steps do not stand in memory of their own; None where they do."""
        return "inputs of decode steps have no memory of their own" if self._fixed is None else None

    def empty(self) -> None:
        """Let no row of that memory stand for anything."""
        assert self._fixed is not None
        none = np.empty(0, np.int64)
        self.send.begin()
        self._fixed.fill(none, none, [none] * len(self._batch.groups), self._batch.num_slots)
        self.send.end()

    def of_shape(self, num_rows: int, longest: int) -> ForwardBatch:
        """Return the first rows of that memory, whatever stands there, for sequences of up to `longest` tokens."""
        fixed = self._fixed
        assert fixed is not None
        return ForwardBatch(
            input_ids=fixed.input_ids[:num_rows],
            positions=fixed.positions[:num_rows],
            attention=fixed.batches(num_rows, longest),
            sample_rows=fixed.positions[:0],
            long_rows=fixed.is_long[:num_rows] if self._long_from else None,
            fixed=fixed,
        )

    def settings(self, rows: StepRows) -> SamplingRows:
        """Return how the next token of each row that is sampled is to be chosen."""
        if self._settings is None:
            self._settings = self._batch.sampling_rows(rows.sample_slots)
        else:
            self._settings.position[:] = self._batch.num_tokens[rows.sample_slots]
        return self._settings

    def _forward(self, rows: StepRows) -> ForwardBatch:
        is_long = self._is_long(rows)
        return ForwardBatch(
            input_ids=self.send(rows.input_ids),
            positions=self.send(rows.positions),
            attention=tuple(map(self._attention, repeat(rows), rows.groups, self._batch.groups)),
            sample_rows=self.send(rows.sample_rows),
            long_rows=None if is_long is None else self.send(is_long),
        )

    def _forward_fixed(self, fixed: DecodeRows, rows: StepRows, sample_rows: torch.Tensor) -> ForwardBatch:
        """Return a step of single rows in `fixed` memory, where their tables stand already."""
        bucket, is_long = self.pad_to(rows.num_rows), self._is_long(rows)
        mappings = [group.slot_mapping for group in rows.groups]
        attention = fixed.fill(rows.input_ids, rows.positions, mappings, bucket, is_long)
        return ForwardBatch(
            input_ids=fixed.input_ids[:bucket],
            positions=fixed.positions[:bucket],
            attention=attention,
            sample_rows=sample_rows,
            long_rows=None if is_long is None else fixed.is_long[:bucket],
            fixed=fixed,
            num_rows=rows.num_rows,
        )

    def _is_long(self, rows: StepRows) -> np.ndarray | None:
        return self._batch.max_length[rows.row_slots] > self._long_from if self._long_from else None

    def _attention(self, rows: StepRows, own: GroupRows, kind_and_window: tuple[str, int]) -> AttentionBatch:
        kind, window = kind_and_window
        if self._is_native and not own.segments:
            decodes = NativeDecodes(
                slot_mapping=own.slot_mapping,
                lengths=rows.decode_lengths,
                tables=own.tables,
                slots=own.decode_slots,
                kind=kind,
                window=window,
            )
            self._decodes.append(decodes)
            return decodes.batch
        if self._is_native:
            return build_native_batch(
                slot_mapping=own.slot_mapping,
                segments=own.segments,
                decode_lengths=rows.decode_lengths,
                decode_tables=own.decode_tables,
                kind=kind,
                window=window,
            )
        if self._is_gpu:
            return build_gpu_batch(
                slot_mapping=own.slot_mapping,
                segments=own.segments,
                decode_lengths=rows.decode_lengths,
                decode_tables=own.decode_tables,
                device=self._device,
                send=self.send,
                kind=kind,
                window=window,
            )
        return build_attention_batch(
            slot_mapping=own.slot_mapping,
            segments=own.segments,
            decode_lengths=rows.decode_lengths,
            decode_tables=own.decode_tables,
            block_size=self._batch.block_size,
            device=self._device,
            kind=kind,
            window=window,
        )
