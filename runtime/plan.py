"""The two hand-offs between engine and workers: `StepPlan` (a decision) and `StepResult` (its outcome).

Not a scheduler and not an executor. A plan is a delta: what is not named goes on as before, and every sequence that is
past its prompt decodes one token in every step without being named. With `snapshot=True` a plan names everything.
Shapes: i32 arrays travel as little-endian bytes (`pack`, `unpack`). A sequence lives in a `slot` of its rank's batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

FINISH_NONE, FINISH_STOP, FINISH_LENGTH, FINISH_ERROR = range(4)


def pack(array: np.ndarray, dtype: str = "<i4") -> bytes:
    """Return the elements of `array` as little-endian bytes of `dtype`."""
    return np.ascontiguousarray(array, dtype=dtype).tobytes()


def unpack(data: bytes, dtype: str = "<i4") -> np.ndarray:
    """Return the 1-D array that `pack` wrote (read-only)."""
    return np.frombuffer(data, dtype=dtype)


class SamplingState(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """What a worker must know of a request's sampling. (`gc=False`: one for each request, and none in a cycle.)

    Attributes:
        temperature, top_p, top_k: as in `SamplingParams`.
        seed: always set; the request's own, or one drawn when it arrived.
        num_logprobs: alternatives to report beside each chosen token; -1 when no log-probabilities were asked for.
        eos_token_ids: tokens that end the sequence: end tokens unless it ignores them, and its stop tokens.
        min_tokens: so many tokens are generated before one of those may be.
        min_p, presence_penalty, frequency_penalty, repetition_penalty, logit_bias: as in `SamplingParams`.
        bad_words: token sequences that are not generated.
        num_prompt_logprobs: as `num_logprobs`, for tokens of the prompt.
    """

    temperature: float
    top_p: float
    top_k: int
    seed: int
    num_logprobs: int
    eos_token_ids: tuple[int, ...]
    min_tokens: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    bad_words: tuple[tuple[int, ...], ...] = ()
    num_prompt_logprobs: int = -1


class Admission(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A sequence enters slot `slot`.

    Attributes:
        slot: index in the rank's batch, free before this plan (or released by it).
        sequence_id: unique over the engine's life; a preempted request comes back under a new one.
        tokens: i32, prompt and whatever was generated before.
        max_length: total tokens at which the worker flags FINISH_LENGTH; with no more than it has, it gets no token.
        sampling: see `SamplingState`.
        num_computed_tokens: how many of `tokens` are in KV already, in blocks that this plan grants; snapshots only.
        num_prompt_tokens: how many of `tokens` are its prompt; -1 when all are.
        prompt_logprobs_from: first place of the prompt whose log-probabilities have not been reported; nothing can be
            said of place 0.
    """

    slot: int
    sequence_id: int
    tokens: bytes
    max_length: int
    sampling: SamplingState
    num_computed_tokens: int = 0
    num_prompt_tokens: int = -1
    prompt_logprobs_from: int = 1


class Chunk(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Run tokens [start, start + num_tokens) of the sequence in `slot`; `samples` when the last known token is in."""

    slot: int
    start: int
    num_tokens: int
    samples: bool


class TokenMask(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Which tokens the sequence in `slot` may take in this step.

    `words` are little-endian u32 [ceil(V / 32)]; bit i of word w allows token 32 * w + i. One at least is allowed.
    """

    slot: int
    words: bytes


class RankPlan(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What changes on one rank. Applied in field order: released, admitted, grants; then chunks and all decodes run.

    Attributes:
        released: i32 [R], slots to forget (finished, aborted or preempted).
        admitted: new sequences.
        grants: i32 [G, 4] flattened rows (group, slot, index in the block table, block id).
        chunks: prompt pieces of this step, at most one a slot. A slot whose chunk had `samples` decodes from then on.
        num_decodes: upper bound of decode rows (a sequence that ended in the step before is known only to the worker).
        held: i32 [H], slots that decode and sit out this step, because the mask of their next token has not come.
        masks: of sequences that sample in this step, at most one a slot; the others take any token.
    """

    released: bytes = b""
    admitted: tuple[Admission, ...] = ()
    grants: bytes = b""
    chunks: tuple[Chunk, ...] = ()
    num_decodes: int = 0
    held: bytes = b""
    masks: tuple[TokenMask, ...] = ()

    @property
    def num_rows(self) -> int:
        """Most rows that this rank runs in the step."""
        return self.num_decodes + sum([chunk.num_tokens for chunk in self.chunks])


class StepHeader(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What every rank must agree on before the first collective of a step.

    Attributes:
        step: number of the step, from 0, without gaps.
        epoch: number of the membership; grows when a rank joins or leaves.
        kind: phase of the step over all ranks, one of `telemetry.PHASES`.
        bucket: largest `num_rows` of any attention replica.
        exchange: name of the exchange that the step uses.
        snapshot: forget every slot first; the plan then admits the whole batch and runs a step of it. What is in KV
            is not sent, so this holds for workers that kept theirs. A sequence past its prompt comes as a chunk of its
            last known token that `samples`; `num_decodes` is 0 and nothing is implicit.
        overlap: what runs while rows travel, as `topologies.overlap_choice` names it.
        traced: say where the time of this step went (`RankResult.marks`).
        placement: number of the placement of experts that holds in the step; ranks have prepared it.
        counts: every rank sends its counters with the result.
    """

    step: int
    epoch: int
    kind: str
    bucket: int
    exchange: str
    snapshot: bool = False
    overlap: str = "none"
    traced: bool = False
    placement: int = 0
    counts: bool = False


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One step of one group: a header for all and a delta for each attention replica (a rank where `atp` is 1)."""

    header: StepHeader
    ranks: tuple[RankPlan, ...]

    def of_ranks(self, atp: int) -> Iterator[RankPlan]:
        """Yield what each rank of the group gets: `atp` ranks one after another are an attention replica."""
        return (plan for plan in self.ranks for _ in range(atp))


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Log-probabilities at one generated token: the chosen token first, then the most likely ones in order.

    `rank` counts from 1: how many tokens are at least as likely as the chosen one.
    """

    sequence_id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int


class PromptLogprobs(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Log-probabilities at n places of a prompt, one after another; each piece goes on where the one before ended.

    Attributes:
        slot, sequence_id: whose.
        start: the first place.
        token_ids: i32 [n, 1 + k] flattened, the prompt's own token first, then the most likely ones in order.
        logprobs: f32 [n, 1 + k] flattened.
        ranks: i32 [n], of the prompt's own tokens, see `TokenLogprobs`.
    """

    slot: int
    sequence_id: int
    start: int
    token_ids: bytes
    logprobs: bytes
    ranks: bytes


class RankResult(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What one rank did in one step. Arrays of equal length n, one entry for each sequence that came on.

    Of the ranks of an attention replica only the first tells of sequences.

    Attributes:
        step: which step this answers.
        slots, sequence_ids: i32, i64 [n].
        tokens: i32, those of each sequence in order, one sequence after another.
        flags: u8 [n], FINISH_*; FINISH_ERROR means logits were not finite, its tokens are meaningless. Empty when all
            are FINISH_NONE.
        logprobs: for those that asked, one entry a token, in order.
        num_rows: rows really run (0 on an idle rank); of the ranks of an attention replica each its own part of them.
        busy_seconds: time from first to last operation.
        counters: now and then, the rank's counters (runtime/metrics/stats.py encodes them); else empty.
        counts: i32 [n], how many of `tokens` belong to each sequence; empty when each got one.
        prompt_logprobs: of chunks whose requests asked.
        marks: where its time went, if the header asked (`telemetry.StepMarks.packed`); else empty.
    """

    step: int
    slots: bytes = b""
    sequence_ids: bytes = b""
    tokens: bytes = b""
    flags: bytes = b""
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_rows: int = 0
    busy_seconds: float = 0.0
    counters: bytes = b""
    counts: bytes = b""
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    marks: bytes = b""


class StepResult(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The outcome of one step on all attention replicas (ranks where `atp` is 1).

    `num_rows` counts the rows of all ranks of the group.
    """

    step: int
    ranks: tuple[RankResult, ...]
    num_rows: int = 0


def result_of_ranks(step: int, ranks: Sequence[RankResult], atp: int) -> StepResult:
    """Return the outcome of a step from what all ranks of the group say: the first of each attention replica tells."""
    assert all(result.step == step for result in ranks), (step, [result.step for result in ranks])
    return StepResult(step=step, ranks=tuple(ranks[::atp]), num_rows=sum(result.num_rows for result in ranks))
