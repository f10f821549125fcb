"""The choices of the scheduler as pure functions: who goes first, how a step's rows are shared, what its header says.

Not state and not bookkeeping (runtime/scheduler.py, batch_state.py): plain values in, plain values out.
Units: tokens (= rows of a step).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..plan import RankPlan, StepHeader
from .request import Request

Precedence = tuple[int, float, str]


def precedence(request: Request, policy: str) -> Precedence:
    """Return a sort key: the smallest is served first, the largest is preempted first. Live requests never tie."""
    return (request.priority if policy == "priority" else 0, request.arrival, request.request_id)


def share_tokens(needs: Sequence[int], budget: int) -> list[int]:
    """Share the rows that decodes leave among the prompts of a rank.

    Half goes to them in their order, so that the first is done early instead of all being late together. The other
    half is shared evenly, so that a short prompt behind a long one is not held up and every one of them advances.

    Args:
        needs: tokens that each prompt still has to run, in order of precedence, each at least 1.
        budget: rows to share, at least 0.

    Returns:
        Tokens for each: at most its need, in sum min(budget, sum(needs)), and each at least 1 if budget >= len(needs).

    Example:
        >>> share_tokens([30000, 100, 5], 512)
        [407, 100, 5]
        >>> share_tokens([30000, 30000], 512)
        [384, 128]
    """
    evenly = min(budget, max(budget // 2, len(needs)))
    shares = fill_evenly(needs, evenly)
    left = budget - sum(shares)
    for i, need in enumerate(needs):
        more = min(need - shares[i], left)
        shares[i] += more
        left -= more
    return shares


def fill_evenly(needs: Sequence[int], budget: int) -> list[int]:
    """Share `budget` like water between vessels: none gets more than it needs, none gets less than a fuller one.

    What does not divide goes to the first ones that can still take it.

    Example:
        >>> fill_evenly([2, 10, 10], 13)
        [2, 6, 5]
    """
    shares = [0] * len(needs)
    open_to_more = [i for i, need in enumerate(needs) if need > 0]
    left = budget
    while open_to_more and left >= len(open_to_more):
        level = left // len(open_to_more)
        for i in open_to_more:
            more = min(needs[i] - shares[i], level)
            shares[i] += more
            left -= more
        open_to_more = [i for i in open_to_more if shares[i] < needs[i]]
    for i in open_to_more[:left]:
        shares[i] += 1
    return shares


def step_kind(ranks: Sequence[RankPlan]) -> str:
    """Return the kind of a step over all ranks: `idle`, `prefill`, `decode` or `mixed`."""
    has_chunks = any(rank.chunks for rank in ranks)
    has_decodes = any(rank.num_decodes for rank in ranks)
    if has_chunks and has_decodes:
        return "mixed"
    return "prefill" if has_chunks else "decode" if has_decodes else "idle"


def step_header(
    ranks: Sequence[RankPlan], *, step: int, epoch: int, way_of: Callable[[str, int], tuple[str, str]], snapshot: bool
) -> StepHeader:
    """Return what all ranks agree on, a function of their plans; `way_of`: kind and bucket to exchange and overlap."""
    bucket = max(rank.num_rows for rank in ranks)
    kind = step_kind(ranks)
    exchange, overlap = way_of(kind, bucket)
    return StepHeader(
        step=step, epoch=epoch, kind=kind, bucket=bucket, exchange=exchange, snapshot=snapshot, overlap=overlap
    )
