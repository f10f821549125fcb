"""The decode step of one rank as a function over memory that never moves: what is captured, and what a replay repeats.

Not the capturing (capture.py) and not the numbers of a step (runtime/ranks/step_inputs.py writes them before a replay).
Shapes: R rows, as in capture.py.
"""

from __future__ import annotations

from ...kvcache.storage import KVStorage
from ...models.decoder import Decoder
from ...moe.wide_ep.exchanges import Exchange, StepwiseExchange
from ..ranks.row_scan import scan_on_device
from ..ranks.step_inputs import InputBuilder
from .capture import StepTensors
from .ladder import GraphLadder, GraphShape


class DecodeStep:
    """`CapturableStep` of a decoder with kernels of a GPU.

    What it leaves stands in one place for all shapes, outside the memory of graphs: a matrix of logits for each would
    be more than all else that they hold. The largest shape comes first and makes room for all.

    Args:
        decoder: of the rank.
        storage: its KV.
        inputs: of its steps, in memory of their own.
        exchange: of experts.
        ladder: says what overlaps.
    """

    def __init__(
        self,
        decoder: Decoder,
        storage: KVStorage,
        inputs: InputBuilder,
        exchange: Exchange,
        ladder: GraphLadder,
    ) -> None:
        self._decoder, self._storage, self._inputs = decoder, storage, inputs
        self._exchange, self._ladder = exchange, ladder
        self._left: StepTensors | None = None

    def empty(self) -> None:
        """Fill no row; see `CapturableStep.empty`."""
        self._inputs.empty()

    def __call__(self, shape: GraphShape) -> StepTensors:
        """Launch the step; see `CapturableStep.__call__`."""
        if isinstance(self._exchange, StepwiseExchange):
            self._exchange.begin_step(self._ladder.exchange, shape.rows)
        batch = self._inputs.of_shape(shape.rows, shape.tokens)
        hidden = self._decoder.compute(batch, self._storage, overlap=self._ladder.overlap)
        logits = self._decoder.head(hidden)
        best, finite = scan_on_device(logits)
        made = StepTensors(hidden=hidden, logits=logits, best=best, finite=finite, well=scan_on_device(hidden)[1])
        if self._left is None or len(self._left.best) < shape.rows:
            self._left = made.room()
        left = self._left.first(shape.rows)
        left.copy_(made)
        return left
