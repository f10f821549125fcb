"""The forward pass of one rank's step: its graph is replayed where there is one, else the decoder is called.

Not the choice of tokens and not the inputs. Shapes: as in capture.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...kvcache.storage import KVStorage
from ...models.decoder import Decoder
from ...telemetry import StepMarks
from ..plan import StepHeader
from ..ranks.step_inputs import InputBuilder, StepInputs
from .capture import DecodeGraphs, StepTensors


class StepForward:
    """Call `begin` for each step, build its inputs, then call it.

    Attributes:
        decoder, storage, inputs: of the rank.
        graphs: of decode steps, once they are captured; None runs all of them eagerly.
    """

    def __init__(self, decoder: Decoder, storage: KVStorage, inputs: InputBuilder) -> None:
        self.decoder, self.storage, self.inputs = decoder, storage, inputs
        self._num_rows: int | None = None
        self.graphs: DecodeGraphs | None = None
        inputs.pad_to = self._pad

    def begin(self, header: StepHeader) -> int | None:
        """Return how many rows all ranks run in the step; None: each as many as it has."""
        self._num_rows = None if self.graphs is None else self.graphs.ladder.rows_of(header)
        return self._num_rows

    def __call__(
        self,
        header: StepHeader,
        inputs: StepInputs,
        before_layers: Callable[[], None] | None,
        marks: StepMarks | None,
    ) -> tuple[torch.Tensor, StepTensors | None]:
        """Run the rows of the step through all layers.

        Args:
            header, inputs: of the step.
            before_layers: called once, when all that layers need is there; of a graph, when it was launched.
            marks: get the parts of a traced step.

        Returns:
            [T, D] hidden states after the final norm, and all that a replay left of T rows; None after no replay.
        """
        forward, num_filled = inputs.forward, inputs.rows.num_rows
        found = self._replay(inputs, before_layers)
        if found is not None:
            self.decoder.count(forward, self.storage, found.hidden, num_logits=num_filled)
            found = found.first(num_filled)
            return found.hidden, found
        overlap = header.overlap
        if self.graphs is not None and self._num_rows is not None:  # other ranks may replay
            overlap = self.graphs.ladder.overlap
        hidden = self.decoder.forward(forward, self.storage, before_layers, overlap=overlap, marks=marks)
        return hidden[:num_filled], None

    def _replay(self, inputs: StepInputs, before_layers: Callable[[], None] | None) -> StepTensors | None:
        graphs, rows = self.graphs, inputs.rows
        if graphs is None or self._num_rows is None or rows.segments:
            return None
        shape = graphs.ladder.shape_of(self._num_rows, int(rows.positions.max(initial=0)) + 1)
        if shape is None or not graphs.holds(shape):
            return None
        launched = graphs.replay(shape)
        if before_layers is not None:  # what it does for others is done while the device works
            before_layers()
        return launched

    def _pad(self, num_rows: int) -> int:
        return num_rows if self._num_rows is None else self._num_rows
