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
        places: [n] i64, sequences that hold their slot, got one token each, and go on.
        tokens: [n] i32, theirs.
        updates: of all others, with their tokens appended; those that end have to be forgotten yet.
    """

    places: np.ndarray
    tokens: np.ndarray
    updates: list[SequenceUpdate]


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
        return len(self._came.places) + len(self._came.updates)

    def __iter__(self) -> Iterator[SequenceUpdate]:
        return iter(self._all())

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def _all(self) -> list[SequenceUpdate]:
        if self._made is None:
            assert self._turnover == self._batch.turnover, "updates were left until slots had changed hands"
            requests, came = self._batch.requests, self._came
            owners = cast(list[Request], [requests[place] for place in came.places.tolist()])
            pairs = zip(owners, came.tokens.tolist(), strict=True)
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
    places, tokens = _read_plain(plain, batch, departed, updates) if plain else (np.empty(0, np.int64),) * 2
    return Came(places=places, tokens=tokens, updates=updates)


def _read_plain(
    outcomes: list[tuple[int, RankResult]],
    batch: BatchState,
    departed: Mapping[int, Request],
    updates: list[SequenceUpdate],
) -> tuple[np.ndarray, np.ndarray]:
    """Return places and tokens of those that go on; `updates` get the others. Each sequence got one token."""
    slots = unpack(b"".join([outcome.slots for _, outcome in outcomes]))
    ids = unpack(b"".join([outcome.sequence_ids for _, outcome in outcomes]), "<i8")
    tokens = unpack(b"".join([outcome.tokens for _, outcome in outcomes]))
    sizes = [len(outcome.slots) // 4 for _, outcome in outcomes]
    assert len(slots) == len(ids) == len(tokens), "a result says nothing of how many tokens a sequence got"
    first_places = np.array([rank for rank, _ in outcomes]) * batch.config.max_num_seqs
    places = np.repeat(first_places, sizes) + slots
    is_current = batch.sequence_id.reshape(-1)[places] == ids
    goes_on = is_current
    flags = None
    if any([outcome.flags for _, outcome in outcomes]):
        parts = [outcome.flags or bytes(size) for (_, outcome), size in zip(outcomes, sizes)]
        flags = unpack(b"".join(parts), "u1")
        goes_on = is_current & (flags == FINISH_NONE)
    if goes_on.all():
        return places, tokens
    at = np.flatnonzero(~goes_on)
    found = zip(places[at].tolist(), ids[at].tolist(), is_current[at].tolist(), strict=True)
    owners = [batch.requests[place] if current else departed.get(sequence_id) for place, sequence_id, current in found]
    _settle(owners, batch)
    verdicts = [FINISH_NONE] * len(at) if flags is None else flags[at].tolist()
    for request, token, flag in zip(owners, tokens[at].tolist(), verdicts, strict=True):
        if request is not None:  # else it was aborted or finished with this token in flight
            if flag != FINISH_ERROR:
                request.past.append(token)
            updates.append(_update(request, [token], flag, ()))
    return places[goes_on], tokens[goes_on]


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
                request.past.extend(tokens)
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
    batch.log.settle([request for request in owners if request is not None and request.log is not None])


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
