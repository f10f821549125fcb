"""The step that comes most often, planned in a few operations: all decode, nobody comes, goes or waits.

Not a policy of its own: its plans are those that the scheduler would make of the same state the long way
(scheduler.py), and wherever it would have to choose, preempt or end something, it makes none.
Shapes: N decoding sequences over W ranks, in order of rank and slot; units: tokens, blocks, steps.
"""

from __future__ import annotations

import numpy as np

from ..plan import RankPlan, StepHeader, StepPlan
from .batch_state import DECODE, PREFILL, BatchState


class SteadyBatch:
    """Sequences that decode one token a step each until one of them ends or somebody else changes the batch.

    Args:
        batch: as it is now.
    """

    def __init__(self, batch: BatchState) -> None:
        self._version = batch.version
        self._decoding = batch.phase == DECODE
        # Somebody decodes, nobody is within a prompt, and nobody waits for masks; or there is nothing to plan here.
        self._usable = bool(self._decoding.any()) and not ((batch.phase == PREFILL) | batch.constrained).any()
        if not self._usable:
            return
        self._ranks, self._slots = batch.where(self._decoding)  # [N]
        num_decodes = self._decoding.sum(1).tolist()
        self._bucket: int = max(num_decodes)
        self._exchange, self._overlap = batch.config.way_of("decode", self._bucket)
        self._plans = tuple(RankPlan(num_decodes=num) for num in num_decodes)
        computed = batch.computed[self._ranks, self._slots]
        self._age = 0  # steps since then
        self._ends_at = int((batch.limit[self._ranks, self._slots] - computed).min())
        granted = batch.granted[self._ranks, self._slots]
        self._full_at = granted * batch.config.block_size - computed  # [N], age at which a sequence needs a block
        self._next_full = int(self._full_at.min())

    def holds(self, batch: BatchState) -> bool:
        """Tell whether nobody else has changed `batch` since the last step that was planned here."""
        return self._version == batch.version

    def plan(self, batch: BatchState, *, step: int, epoch: int) -> StepPlan | None:
        """Book one more step in `batch` and return it; None, with nothing planned, where the long way has to be taken.

        `holds` must be true.
        """
        if not self._usable or self._age >= self._ends_at:
            return None
        batch.free_passed()  # as the long way does at this place: pools give blocks back in the order they came in
        if (ranks := self._next(batch)) is None:
            return None
        header = StepHeader(
            step=step,
            epoch=epoch,
            kind="decode",
            bucket=self._bucket,
            exchange=self._exchange,
            overlap=self._overlap,
        )
        return StepPlan(header=header, ranks=ranks)

    def _next(self, batch: BatchState) -> tuple[RankPlan, ...] | None:
        plans = self._plans
        if self._age >= self._next_full:
            at = np.flatnonzero(self._full_at == self._age)
            ranks, slots = self._ranks[at], self._slots[at]
            if (np.bincount(ranks, minlength=len(plans)) > batch.free_blocks.min(0)).any():
                return None
            grants = batch.grant(ranks, slots, batch.granted[ranks, slots])
            self._version = batch.version
            self._full_at[at] += batch.config.block_size
            self._next_full = int(self._full_at.min())
            plans = tuple(
                RankPlan(grants=own, num_decodes=plan.num_decodes) if own else plan for own, plan in zip(grants, plans)
            )
        np.add(batch.computed, self._decoding, out=batch.computed, casting="unsafe")
        self._age += 1
        return plans
