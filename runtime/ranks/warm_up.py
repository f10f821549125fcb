"""The steps that a rank runs before any request comes: made-up sequences, each with its prompt and one token more.

Not the running (runtime/worker.py) and nothing that stays: slots, blocks and counters are cleared afterwards.
Units: tokens, blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..plan import Admission, Chunk, RankPlan, SamplingState, StepHeader, pack

WARM_UP_TOKENS = 8
FIRST_STEP = -2


def warm_up_sizes(block_size: int, most_rows: int, *, compiles: bool) -> list[int]:
    """Return the lengths of the made-up prompts, the largest first.

    Args:
        block_size: tokens a block.
        most_rows: of a step, and no more than a sequence may have.
        compiles: kernels take another form for other numbers of rows, and are compiled when they first run.

    Example:
        Blocks of 16, 100 rows: 100, 64, 32, 16, 8, 4 and 2 where forms are compiled, else 8 alone. One row is what
        each of them decodes.
    """
    fewest = max(1, min(WARM_UP_TOKENS, block_size - 1))
    if not compiles:
        return [fewest]
    powers = [1 << i for i in range(1, most_rows.bit_length())]
    return sorted({max(1, most_rows), *powers}, reverse=True)


def warm_up_plans(
    exchange: str, block_size: int, num_blocks: Sequence[int], num_tokens: int
) -> tuple[list[tuple[StepHeader, RankPlan]], list[int]]:
    """Return headers and plans, the same for every rank, and how many of the first blocks of each group they use.

    Args:
        exchange: that the steps use.
        block_size: tokens a block.
        num_blocks: of each cache group; where they are few the sequence takes them in circles.
        num_tokens: of the prompt.
    """
    sampling = SamplingState(temperature=1.0, top_p=0.9, top_k=0, seed=0, num_logprobs=1, eos_token_ids=())
    prompt = Admission(
        slot=0, sequence_id=0, tokens=pack(np.zeros(num_tokens)), max_length=num_tokens + 2, sampling=sampling
    )
    chunk = Chunk(slot=0, start=0, num_tokens=num_tokens, samples=True)
    most = -(-(num_tokens + 1) // block_size)
    used = [min(most, blocks) for blocks in num_blocks]
    table = np.array([(group, 0, i, i % n) for group, n in enumerate(used) for i in range(most)])
    plans = (RankPlan(admitted=(prompt,), grants=pack(table), chunks=(chunk,)), RankPlan(num_decodes=1))
    steps = [
        (StepHeader(step=FIRST_STEP + i, epoch=0, kind="prefill", bucket=num_tokens, exchange=exchange), plan)
        for i, plan in enumerate(plans)
    ]
    return steps, used
