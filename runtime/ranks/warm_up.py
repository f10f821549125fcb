"""The steps that a rank runs before any request comes: made-up sequences with their prompts, and a token more of each.

Not the running (runtime/worker.py) and nothing that stays: slots, blocks and counters are cleared afterwards.
Units: tokens, blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from ...moe.kernels.router import MOST_ROWS
from ...moe.wide_ep.exchanges import Exchange, StepwiseExchange
from ...topologies.exchange_choice import MOST_PADDED_ROWS
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
        Blocks of 16, 100 rows: 100, 64, 32, 16, 8, 4 and 2 where forms are compiled, else 8 alone.
    """
    fewest = max(1, min(WARM_UP_TOKENS, block_size - 1))
    if not compiles:
        return [fewest]
    powers = [1 << i for i in range(1, most_rows.bit_length())]
    return sorted({max(1, most_rows), *powers}, reverse=True)


def warm_up_decodes(most: int, *, compiles: bool) -> list[int]:
    """Return how many made-up sequences of one token decode together, in steps of their own, the most first.

    Rows that decode know on the device how many of them stand for something, which prompts do not: kernels that route
    take another form for that, one for a row alone, one for few rows and one for more than a program holds. Graphs hold
    these forms for no more rows than they have, and none of a step that is traced.

    Args:
        most: sequences that decode at once.
        compiles: as of `warm_up_sizes`; if not, none.

    Example:
        256 sequences: 256, 17, 2 and 1. Beyond 16 rows torch multiplies the router.
    """
    return sorted({min(number, most) for number in (1, 2, MOST_ROWS + 1, most)}, reverse=True) if compiles else []


def warm_up_shapes(
    exchange: Exchange, block_size: int, most_rows: int, most_decodes: int, *, compiles: bool
) -> list[tuple[str, int, int]]:
    """Return what to run: an exchange, the tokens of each prompt, and how many sequences there are.

    Args:
        exchange: of the rank. Where kernels are compiled each that it can be has its turn.
        block_size, most_rows, compiles: as of `warm_up_sizes`.
        most_decodes: as of `warm_up_decodes`.
    """
    names = exchange.names if compiles and isinstance(exchange, StepwiseExchange) else (exchange.name,)
    shapes: list[tuple[str, int, int]] = []
    for name in names:
        most = MOST_PADDED_ROWS if name == "padded" else most_rows
        sizes = warm_up_sizes(block_size, min(most, most_rows), compiles=compiles)
        decodes = warm_up_decodes(min(most, most_decodes), compiles=compiles)
        shapes += [(name, num_tokens, 1) for num_tokens in sizes] + [(name, 1, number) for number in decodes]
    return shapes


def warm_up_plans(
    exchange: str, block_size: int, num_blocks: Sequence[int], num_tokens: int, num_sequences: int = 1
) -> tuple[list[tuple[StepHeader, RankPlan]], list[int]]:
    """Return headers and plans, the same for every rank, and how many of the first blocks of each group they use.

    Args:
        exchange: that the steps use.
        block_size: tokens a block.
        num_blocks: of each cache group; where they are few the sequences take them in circles.
        num_tokens: of each prompt.
        num_sequences: that decode together.
    """
    told = SamplingState(temperature=1.0, top_p=0.9, top_k=0, seed=0, num_logprobs=1, eos_token_ids=())
    plain = msgspec.structs.replace(told, num_logprobs=-1)  # the most likely tokens of all rows would take much memory
    tokens, slots = pack(np.zeros(num_tokens)), range(num_sequences)
    prompts = tuple(
        Admission(
            slot=slot, sequence_id=slot, tokens=tokens, max_length=num_tokens + 2, sampling=plain if slot else told
        )
        for slot in slots
    )
    chunks = tuple(Chunk(slot=slot, start=0, num_tokens=num_tokens, samples=True) for slot in slots)
    each = -(-(num_tokens + 1) // block_size)
    used = [min(each * num_sequences, blocks) for blocks in num_blocks]
    table = np.array(
        [(group, slot, i, (slot * each + i) % n) for group, n in enumerate(used) for slot in slots for i in range(each)]
    )
    plans = (RankPlan(admitted=prompts, grants=pack(table), chunks=chunks), RankPlan(num_decodes=num_sequences))
    bucket = num_tokens * num_sequences
    steps = [
        (StepHeader(step=FIRST_STEP + i, epoch=0, kind="prefill", bucket=bucket, exchange=exchange), plan)
        for i, plan in enumerate(plans)
    ]
    return steps, used
