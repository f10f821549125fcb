"""What the results of a step mean to the requests that they are about: whose they are, and which tokens each got.

Not the books' owner (scheduler.py). Nearly all sequences of a step bring one token and go on: those are booked in a few
numpy operations over all ranks (`Came`), and looked at one by one only by whoever wants to tell of them.
Shapes: n sequences of all ranks by place (rank * S + slot); units: tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np

from ..plan import FINISH_ERROR, FINISH_LENGTH, FINISH_NONE, FINISH_STOP, RankResult, StepResult, TokenLogprobs, unpack
from .batch_state import BatchState
from .request import Request, SequenceUpdate
from .token_log import NOTHING

# Of FINISH_*; an error has a text of its own.
REASONS = {FINISH_NONE: None, FINISH_STOP: "stop", FINISH_LENGTH: "length"}
NOT_FINITE = (
    "the model's output for this request was not finite (NaN or infinite numbers); where the server runs "
    "with dtype float16, bfloat16 holds larger ones"
)


@dataclass(frozen=True, kw_only=True)
class Came:
    """What a step brought.

    Attributes:
        places: [n] i64, sequences that got one token each.
        tokens: [n] i32, theirs, for the log to be told; NOTHING of those that have lost their slot, or went wrong.
        goes_on: [n] bool, those that hold their slot and do not end now.
        updates: of those that end, which have to be forgotten yet, and of all others.
    """

    places: np.ndarray
    tokens: np.ndarray
    goes_on: np.ndarray
    updates: list[SequenceUpdate]

    @property
    def num_updates(self) -> int:
        """How many sequences got something."""
        return int(np.count_nonzero(self.goes_on)) + len(self.updates)


class StepUpdates(Sequence[SequenceUpdate]):
    """One update for each sequence that a step brought on; made when they are first looked at.

    Until then nobody may come to a slot or leave one, or tokens would be told to the wrong request.

    Args:
        batch: in which `came` is booked.
        came: what the step brought.
    """

    def __init__(self, batch: BatchState, came: Came) -> None:
        self._batch, self._came, self._turnover = batch, came, batch.turnover
        self._made: list[SequenceUpdate] | None = None

    @property
    def single(self) -> list[SequenceUpdate]:
        """Those that were booked one by one; what ended is among them."""
        return self._came.updates

    def __len__(self) -> int:
        return self._came.num_updates

    def __iter__(self) -> Iterator[SequenceUpdate]:
        return iter(self._all())

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def _all(self) -> list[SequenceUpdate]:
        if self._made is None:
            assert self._turnover == self._batch.turnover, "updates were left until slots had changed hands"
            requests, came = self._batch.requests, self._came
            owners = cast(list[Request], [requests[place] for place in came.places[came.goes_on].tolist()])
            pairs = zip(owners, came.tokens[came.goes_on].tolist(), strict=True)
            self._made = [SequenceUpdate(owner, [token]) for owner, token in pairs] + came.updates
        return self._made


def read(result: StepResult, batch: BatchState, departed: Mapping[int, Request]) -> Came:
    """Sort out `result`.

    Args:
        result: of the oldest step in flight.
        batch: knows those that hold their slot still.
        departed: by sequence id, those that do not and have tokens in flight.
    """
    plain: list[tuple[int, RankResult]] = []
    updates: list[SequenceUpdate] = []
    for rank, outcome in enumerate(result.ranks):
        if outcome.counts or outcome.logprobs or outcome.prompt_logprobs:
            updates += _read_rank(rank, outcome, batch, departed)
        elif outcome.slots:
            plain.append((rank, outcome))
    if not plain:
        nothing = np.empty(0, np.int64)
        return Came(places=nothing, tokens=nothing, goes_on=nothing > 0, updates=updates)
    return _read_plain(plain, batch, departed, updates)


def _read_plain(
    outcomes: list[tuple[int, RankResult]],
    batch: BatchState,
    departed: Mapping[int, Request],
    updates: list[SequenceUpdate],
) -> Came:
    """Return what came if each sequence got one token; `updates` of other ranks get those of these."""
    slots = unpack(b"".join([outcome.slots for _, outcome in outcomes]))
    ids = unpack(b"".join([outcome.sequence_ids for _, outcome in outcomes]), "<i8")
    tokens = unpack(b"".join([outcome.tokens for _, outcome in outcomes]))
    sizes = [len(outcome.slots) // 4 for _, outcome in outcomes]
    assert len(slots) == len(ids) == len(tokens), "a result says nothing of how many tokens a sequence got"
    first_places = np.array([rank for rank, _ in outcomes]) * batch.config.max_num_seqs
    places = first_places.repeat(sizes)
    places += slots
    is_current = batch.sequence_id.reshape(-1)[places] == ids
    flags = np.zeros(len(places), np.uint8)
    if any([outcome.flags for _, outcome in outcomes]):
        flags = unpack(b"".join([outcome.flags or bytes(size) for (_, outcome), size in zip(outcomes, sizes)]), "u1")
    goes_on = is_current & (flags == FINISH_NONE)
    at = np.flatnonzero(~goes_on)
    if not at.size:
        return Came(places=places, tokens=tokens, goes_on=goes_on, updates=updates)
    verdicts = flags[at].tolist()
    found = zip(places[at].tolist(), ids[at].tolist(), tokens[at].tolist(), verdicts, is_current[at].tolist())
    for place, sequence_id, token, flag, current in found:
        request = batch.requests[place] if current else departed.get(sequence_id)
        if request is None:  # it was aborted or finished with this token in flight
            continue
        if not current and flag != FINISH_ERROR:
            request.append([token])
        updates.append(_update(request, [token], flag, ()))
    elsewhere = at[~is_current[at] | (flags[at] == FINISH_ERROR)]
    if elsewhere.size:
        tokens = tokens.copy()
        tokens[elsewhere] = NOTHING
    return Came(places=places, tokens=tokens, goes_on=goes_on, updates=updates)


def _read_rank(
    rank: int, outcome: RankResult, batch: BatchState, departed: Mapping[int, Request]
) -> list[SequenceUpdate]:
    """Return the updates of a rank that reports more than a token for each sequence."""
    owner = partial(_owner, batch, departed, rank)
    prompts = _prompt_updates(outcome, owner)
    logprobs: dict[int, list[TokenLogprobs]] = {}
    for entry in outcome.logprobs:
        logprobs.setdefault(entry.sequence_id, []).append(entry)
    slots, ids = unpack(outcome.slots).tolist(), unpack(outcome.sequence_ids, "<i8").tolist()
    owners = list(map(owner, slots, ids))
    _settle(owners, batch)
    updates = []
    for request, sequence_id, tokens, flag in zip(
        owners, ids, _tokens(outcome), _flags(outcome, len(ids)), strict=True
    ):
        if request is not None:
            if flag != FINISH_ERROR:
                request.append(tokens)
            update = _update(request, tokens, flag, tuple(logprobs.get(sequence_id, ())))
            if prompts and (early := prompts.pop(sequence_id, None)) is not None:
                update.prompt_logprobs = early.prompt_logprobs
            updates.append(update)
    return updates + list(prompts.values())


def _owner(
    batch: BatchState, departed: Mapping[int, Request], rank: int, slot: int, sequence_id: int
) -> Request | None:
    """Return whose sequence that is in a slot of `rank`; None when it was given up."""
    if batch.sequence_id[rank, slot] == sequence_id:
        return batch.request_at(rank, slot)
    return departed.get(sequence_id)


def _settle(owners: Sequence[Request | None], batch: BatchState) -> None:
    """Let those of `owners` that hold a slot have all their tokens; one after another they would take much longer."""
    batch.log.settle([request for request in owners if request is not None and request.log is batch.log])


def _update(request: Request, tokens: list[int], flag: int, logprobs: tuple[TokenLogprobs, ...]) -> SequenceUpdate:
    if flag == FINISH_ERROR:
        return SequenceUpdate(request, [], (), "error", NOT_FINITE)
    return SequenceUpdate(request, tokens, logprobs, REASONS[flag])


def _flags(outcome: RankResult, num: int) -> list[int]:
    """Return FINISH_* of each of the `num` sequences of a result."""
    return unpack(outcome.flags, "u1").tolist() if outcome.flags else [FINISH_NONE] * num


def _tokens(outcome: RankResult) -> list[list[int]]:
    """Return the new tokens of each sequence of a result, in its order."""
    tokens = unpack(outcome.tokens).tolist()
    if not outcome.counts:
        return [[token] for token in tokens]
    ends = np.cumsum(unpack(outcome.counts)).tolist()
    return [tokens[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _prompt_updates(outcome: RankResult, owner: Callable[[int, int], Request | None]) -> dict[int, SequenceUpdate]:
    """Return updates, by sequence id, for requests whose prompts' log-probabilities came, and count their places.

    `owner` tells whose the sequence in a slot is, by its slot and its id.
    """
    updates: dict[int, SequenceUpdate] = {}
    for piece in outcome.prompt_logprobs:
        request = owner(piece.slot, piece.sequence_id)
        if request is not None:
            assert piece.start == request.num_prompt_logprobs + 1, "a place of a prompt is missing, or came twice"
            request.num_prompt_logprobs += len(piece.ranks) // 4
            updates.setdefault(piece.sequence_id, SequenceUpdate(request, [])).prompt_logprobs += (piece,)
    return updates
