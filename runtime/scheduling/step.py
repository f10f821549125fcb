"""The decisions of one step while they are made, and how they become the plans of all ranks.

Not the order of things (scheduler.py): functions over `BatchState` that size chunks, weigh ranks and write plans.
Shapes: W ranks, S slots a rank; units are tokens and blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..params import EXPECTED_OUTPUT_TOKENS
from ..plan import Admission, Chunk, RankPlan, SamplingState, TokenMask, pack
from .admission import RankLoads
from .batch_state import DECODE, PREFILL, BatchState, Seats, counting, split_rows
from .limits import SchedulerConfig
from .policy import precedence, share_tokens
from .request import TOKEN_BYTES, Request

# Requests that are placed together where they fit without a doubt; of more, most might be looked at in vain each step.
MOST_TOGETHER = 1024
# Tokens of prompts in one step of a rank whose log-probabilities are told: each costs a row of logits and its report.
MOST_JUDGED_TOKENS = 1024


@dataclass(frozen=True, kw_only=True)
class Decodes:
    """Who decodes one token in a step.

    Attributes:
        places: [W, S] bool.
        counts: [W] i64, how many on each rank.
        growing_ranks, growing_slots: [n] i64, those of them that need another block, in order of rank and slot.
        num_growing: [W] i64, how many on each rank.
    """

    places: np.ndarray
    counts: np.ndarray
    growing_ranks: np.ndarray
    growing_slots: np.ndarray
    num_growing: np.ndarray


def all_decodes(batch: BatchState, places: np.ndarray) -> Decodes:
    """Return what it means that `places` [W, S] bool decode."""
    ranks, slots = batch.where(batch.growing(places))
    return Decodes(
        places=places,
        counts=places.sum(1),
        growing_ranks=ranks,
        growing_slots=slots,
        num_growing=np.bincount(ranks, minlength=len(places)),
    )


@dataclass
class StepDraft:
    """What a step will run.

    Attributes:
        decodes: who decodes.
        chunks: for each rank, its prompt pieces in order of slot.
        held: for each rank, slots that are past their prompt and sit out.
        masks: for each rank, filled when the step is booked.
    """

    decodes: Decodes
    chunks: list[list[Chunk]]
    held: list[bytes]
    masks: list[tuple[TokenMask, ...]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """True when no rank has a row to run."""
        return not (self.decodes.counts.any() or any(self.chunks))


def token_work(num_tokens: int, max_length: int) -> int:
    """Return the tokens that a rank takes on with a request: its known ones, and its expected output."""
    return min(max_length, num_tokens + EXPECTED_OUTPUT_TOKENS)


def rank_loads(batch: BatchState, *, num_growing: np.ndarray, blocked: np.ndarray) -> RankLoads:
    """Measure every rank before admission; those in `blocked` [W] bool get no free slot. `num_growing`: see Decodes."""
    config, num_sequences = batch.config, np.count_nonzero(batch.phase, axis=1)
    prefilling = batch.phase == PREFILL
    has_prompts = bool(prefilling.any())
    whole = (batch.limit + (config.block_size - 1)) // config.block_size  # 0 in a free slot
    spare, worst = batch.free_blocks - num_growing, np.empty_like(batch.free_blocks)
    for g, most in enumerate(config.most_held):
        if has_prompts:
            prompt, held = -(-batch.known // config.block_size), batch.granted - batch.first[g]
            spare[g] -= np.where(prefilling, np.minimum(prompt, most) - held, 0).sum(1)
        worst[g] = np.minimum(whole, most).sum(1)
    # What is left of prompts, and of outputs or what is expected of them; the 1 of each free slot is taken off.
    prompts = np.maximum(batch.known, batch.computed)
    work = np.minimum(batch.limit + 1 - prompts, EXPECTED_OUTPUT_TOKENS) + (prompts - batch.computed)
    num_free = config.max_num_seqs - num_sequences
    return RankLoads(
        free_slots=np.where(blocked, 0, num_free).tolist(),
        spare_blocks=spare.T.tolist(),
        num_sequences=num_sequences.tolist(),
        worst_blocks=worst.T.tolist(),
        token_work=(work.sum(1) - num_free).tolist(),
        num_blocks=batch.num_blocks.tolist(),
    )


def place_in_order(
    requests: Sequence[Request], loads: RankLoads, config: SchedulerConfig, group_needs: Callable[[int], Sequence[int]]
) -> Seats:
    """Return a seat for each of `requests`, which wait, in their order, up to the first that no rank has room for.

    There may be as many as there are free slots. `group_needs` is that of `config`, which may remember.
    """
    if len(requests) <= MOST_TOGETHER and (seats := _place_together(requests, loads, config)) is not None:
        return seats
    ranks, known, limits = [], [], []
    for request in requests:
        num_tokens, limit = request.num_tokens, request.most_computed
        rank = loads.place(
            prompt_blocks=group_needs(num_tokens),
            worst_blocks=group_needs(limit),
            token_work=token_work(num_tokens, request.max_length),
        )
        if rank < 0:
            break
        ranks.append(rank)
        known.append(num_tokens)
        limits.append(limit)
    return Seats(requests[: len(ranks)], ranks, np.array(known), np.array(limits))


def _place_together(requests: Sequence[Request], loads: RankLoads, config: SchedulerConfig) -> Seats | None:
    """Return a seat for each of `requests`, or None, with nothing booked, where some might not fit on some rank."""
    prompts = np.array([len(request.prompt_token_ids) for request in requests])
    known = prompts + np.array([len(request.past) for request in requests]) // TOKEN_BYTES
    ends = np.array([request.max_length for request in requests])
    limits = np.maximum(ends - 1, prompts)  # as `Request.most_computed`
    if not loads.fit_all(config.needs_of(limits).sum(1).tolist()):
        return None
    work = np.minimum(ends, known + EXPECTED_OUTPUT_TOKENS)  # as `token_work`
    return Seats(requests, loads.place_all(work.tolist()), known, limits)


def draft_chunks(batch: BatchState, decodes: Decodes) -> list[list[Chunk]]:
    """Share what decodes leave of each rank's rows and blocks among its prompts."""
    config = batch.config
    chunks: list[list[Chunk]] = [[] for _ in range(config.num_ranks)]
    ranks, slots = batch.where(batch.phase == PREFILL)  # [n]
    if not ranks.size:
        return chunks
    starts, ends = batch.computed[ranks, slots], batch.known[ranks, slots]
    needs = ends - starts
    rows_left = config.max_num_batched_tokens - decodes.counts
    blocks_left = batch.free_blocks.min(0) - decodes.num_growing  # a token takes room in every group
    blocks = -(-ends // config.block_size) - batch.granted[ranks, slots]
    # Where all prompts can run to their ends nothing has to be shared.
    rows_asked, blocks_asked = (np.bincount(ranks, n, minlength=config.num_ranks) for n in (needs, blocks))
    shares = (rows_asked > rows_left) | (blocks_asked > blocks_left)
    shares[ranks[batch.held[ranks, slots] | batch.judged[ranks, slots]]] = True
    if config.max_chunk_tokens is not None:
        shares[ranks[needs > config.max_chunk_tokens]] = True
    whole = ~shares[ranks]
    found = zip(ranks[whole].tolist(), slots[whole].tolist(), starts[whole].tolist(), needs[whole].tolist())
    for rank, slot, start, need in found:
        chunks[rank].append(Chunk(slot=slot, start=start, num_tokens=need, samples=True))
    for rank in np.flatnonzero(shares & (rows_asked > 0)).tolist():
        chunks[rank] = _shared_chunks(batch, rank, num_rows=int(rows_left[rank]), spare_blocks=int(blocks_left[rank]))
    return chunks


def _shared_chunks(batch: BatchState, rank: int, *, num_rows: int, spare_blocks: int) -> list[Chunk]:
    """Return the chunks of `rank`, whose prompts share so many rows and blocks."""
    config = batch.config
    requests = [batch.request_at(rank, slot) for slot in np.flatnonzero(batch.phase[rank] == PREFILL).tolist()]
    requests.sort(key=lambda request: precedence(request, config.policy))
    slots = [request.slot for request in requests]
    # The last known token is the one that samples: it is left to the step for which there is a mask.
    needs = (batch.known[rank, slots] - batch.computed[rank, slots] - batch.held[rank, slots]).tolist()
    if 0 in needs:
        slots, needs = [slot for slot, need in zip(slots, needs, strict=True) if need], [n for n in needs if n]
    if config.max_chunk_tokens is not None:
        needs = [min(need, config.max_chunk_tokens) for need in needs]
    chunks: list[Chunk] = []
    judged_left = MOST_JUDGED_TOKENS
    for slot, share in zip(slots, share_tokens(needs, num_rows), strict=True):
        if batch.request_at(rank, slot).is_judged:
            share = min(share, judged_left)
            judged_left -= share
        start, granted = int(batch.computed[rank, slot]), int(batch.granted[rank, slot])
        # Decodes may have grown into blocks that this prompt was counted for: it takes what is left and goes on
        # when they end or are preempted.
        size = min(share, (granted + spare_blocks) * config.block_size - start)
        if size <= 0:
            continue
        spare_blocks -= config.blocks_for(start + size) - granted
        samples = start + size == int(batch.known[rank, slot])
        chunks.append(Chunk(slot=slot, start=start, num_tokens=size, samples=samples))
    return sorted(chunks, key=lambda chunk: chunk.slot)


def released_slots(batch: BatchState, released: Sequence[np.ndarray]) -> list[bytes]:
    """Return `RankPlan.released` of each rank for `released` [..][n] i64, places that were vacated, in their order."""
    num_ranks = batch.config.num_ranks
    if not released:
        return [b""] * num_ranks
    ranks, slots = np.divmod(np.concatenate(released), batch.config.max_num_seqs)
    rows = slots[ranks.argsort(kind="stable")].astype("<i4")
    return split_rows(rows.tobytes(), np.bincount(ranks, minlength=num_ranks), row_bytes=rows.itemsize)


def held_slots(batch: BatchState) -> list[bytes]:
    """Return `RankPlan.held` of each rank for the step that is planned now."""
    if not batch.held.any():
        return [b""] * batch.config.num_ranks
    held = batch.held & (batch.phase == DECODE)
    return [pack(np.flatnonzero(row)) for row in held]


def commit(batch: BatchState, draft: StepDraft) -> list[bytes]:
    """Book the step in `batch` and fill `draft.masks`; return each rank's grants (see `BatchState.grant`)."""
    batch.version += 1
    draft.masks = take_masks(batch, draft)
    ranks, slots = draft.decodes.growing_ranks, draft.decodes.growing_slots
    indices = batch.granted[ranks, slots]
    np.add(batch.computed, draft.decodes.places, out=batch.computed, casting="unsafe")
    run = [chunk for chunks in draft.chunks for chunk in chunks]
    if not run:
        return batch.grant(ranks, slots, indices)
    owners = np.repeat(np.arange(len(draft.chunks)), [len(chunks) for chunks in draft.chunks])
    places = np.array([chunk.slot for chunk in run])
    ends = np.array([chunk.start + chunk.num_tokens for chunk in run])
    last = np.array([chunk.samples for chunk in run])
    batch.computed[owners, places] = ends
    batch.phase[owners[last], places[last]] = DECODE
    granted = batch.granted[owners, places].astype(np.int64)
    more = -(-ends // batch.config.block_size) - granted
    ranks = np.concatenate([ranks, np.repeat(owners, more)])
    slots = np.concatenate([slots, np.repeat(places, more)])
    indices = np.concatenate([indices, np.repeat(granted, more) + counting(more)])
    order = np.argsort(ranks, kind="stable")
    return batch.grant(ranks[order], slots[order], indices[order])


def take_masks(batch: BatchState, draft: StepDraft) -> list[tuple[TokenMask, ...]]:
    """Return each rank's masks for the step that `commit` booked; constrained sequences in it wait for their next."""
    masks: list[tuple[TokenMask, ...]] = [() for _ in draft.chunks]
    if not batch.constrained.any():
        return masks
    sampling = draft.decodes.places.copy()
    for rank, chunks in enumerate(draft.chunks):
        sampling[rank, [chunk.slot for chunk in chunks if chunk.samples]] = True
    sampling &= batch.constrained
    batch.held |= sampling
    for rank, slot in np.argwhere(sampling).tolist():
        request = batch.request_at(rank, slot)
        if request.mask is not None:
            masks[rank] += (TokenMask(slot=slot, words=request.mask),)
        request.mask, request.awaits_mask = None, True
    return masks


def sampling_state(request: Request, eos_token_ids: tuple[int, ...]) -> SamplingState:
    """Return what a worker needs to know of how tokens of `request` are chosen."""
    params = request.params
    return SamplingState(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=request.seed,
        num_logprobs=-1 if params.logprobs is None else params.logprobs,
        eos_token_ids=(() if params.ignore_eos else eos_token_ids) + params.stop_token_ids,
        min_tokens=params.min_tokens,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias,
        bad_words=params.bad_word_tokens,
        num_prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
    )


def admission(request: Request, tokens: bytes, *, num_computed_tokens: int = 0) -> Admission:
    """Return what a worker needs to know of `request`, which sits in its slot already and knows all of `tokens`."""
    assert request.sampling is not None, f"{request.request_id} was never added"
    return Admission(
        slot=request.slot,
        sequence_id=request.sequence_id,
        tokens=tokens,
        max_length=request.max_length,
        sampling=request.sampling,
        num_computed_tokens=num_computed_tokens,
        num_prompt_tokens=len(request.prompt_token_ids) if request.past else -1,
        prompt_logprobs_from=request.num_prompt_logprobs + 1,
    )


def delta_plans(
    draft: StepDraft,
    *,
    released: list[bytes],
    admitted: list[list[Request]],
    grants: list[bytes],
) -> tuple[RankPlan, ...]:
    """Write the plan of each rank as what changes (see `RankPlan`); `admitted` have got nothing in their slots yet."""
    return tuple(
        [
            RankPlan(
                released=released[rank],
                admitted=tuple([admission(own, own.prompt_token_ids.tobytes() + own.past) for own in admitted[rank]]),
                grants=grants[rank],
                chunks=tuple(draft.chunks[rank]),
                num_decodes=num_decodes,
                held=draft.held[rank],
                masks=draft.masks[rank],
            )
            for rank, num_decodes in enumerate(draft.decodes.counts.tolist())
        ]
    )


def snapshot_plans(batch: BatchState, draft: StepDraft) -> tuple[RankPlan, ...]:
    """Write the plan of each rank as all that it must hold, after `commit` of `draft`, with nothing in flight."""
    plans = []
    for rank in range(batch.config.num_ranks):
        chunks = {chunk.slot: chunk for chunk in draft.chunks[rank]}
        for slot in np.flatnonzero(draft.decodes.places[rank]).tolist():
            start = int(batch.computed[rank, slot]) - 1
            chunks[slot] = Chunk(slot=slot, start=start, num_tokens=1, samples=True)
        admitted = []
        for request in batch.running(rank):
            chunk = chunks.get(request.slot)
            computed = chunk.start if chunk else int(batch.computed[rank, request.slot])
            admitted.append(admission(request, request.token_bytes(), num_computed_tokens=computed))
        ordered = tuple(chunks[slot] for slot in sorted(chunks))
        plans.append(
            RankPlan(admitted=tuple(admitted), grants=batch.table_rows(rank), chunks=ordered, masks=draft.masks[rank])
        )
    return tuple(plans)
