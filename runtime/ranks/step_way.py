"""How rows go in a step, as its header says: the exchange that it uses, and what overlaps.

Not a choice: the engine made it for all ranks (runtime/scheduling/limits.py). Units: rows of one rank.
"""

from __future__ import annotations

from ...moe.wide_ep.exchanges import Exchange, StagedExchange, StepwiseExchange
from ...topologies.overlap_choice import HALVES, NOTHING
from ..plan import StepHeader


def begin_step(exchange: Exchange, header: StepHeader, rank: int, num_rows: int | None = None) -> None:
    """Set the exchange of `rank` to a step.

    Args:
        exchange: of the rank.
        header: of the step.
        rank: for messages.
        num_rows: that every rank runs, filled or not; None: no more than the header's bucket, in halves if it says so.

    Raises:
        RuntimeError: the rank joined no such exchange, or nothing can overlap in it.
    """
    joined = exchange.names if isinstance(exchange, StepwiseExchange) else (exchange.name,)
    if header.exchange not in joined:
        raise RuntimeError(
            f"step {header.step} uses the exchange {header.exchange!r}, but rank {rank} joined "
            f"{' and '.join(map(repr, joined))}"
        )
    if header.overlap != NOTHING and not isinstance(exchange, StagedExchange):
        raise RuntimeError(
            f"step {header.step} overlaps ({header.overlap}), but rows do not travel in {exchange.name!r}"
        )
    if isinstance(exchange, StepwiseExchange):
        bucket = -(-header.bucket // 2) if header.overlap == HALVES else header.bucket
        exchange.begin_step(header.exchange, bucket if num_rows is None else num_rows)
