"""The scheduler of one expert-parallel group: which tokens run next on every rank, and what became of them.

Not execution and not text: it turns requests into `StepPlan`s and `StepResult`s into updates, with numpy and no device.
Units: tokens, blocks, steps. `schedule` may run ahead of `apply` by any number of steps; the engine uses two.

A step: every sequence past its prompt decodes one token (implicit in the plan); what is left of each rank's row budget
goes to prompts in chunks. Lengths are known ahead; only end tokens, stop strings and aborts come as a surprise, and a
sequence that ends so may have rows planned that the worker drops, or tokens in flight that are ignored here.

A constrained request samples only with a mask, which can be made when its last token is known: it sits out the steps
until then (`RankPlan.held`) while others run ahead, and its prompt waits before its last token.

A token takes a place in every cache group. Groups whose rows see only a window give blocks back on the way: what the
next row of a sequence cannot see is freed when that row's step is planned.

Progress: the first sequence of a rank in precedence is never preempted and fits the pools alone, so it always ends; the
queue is served strictly in order, so the first in it always comes in. Between steps no sequence holds more than its
windows and the block of its next row, whatever its last chunk was, so a chunk never costs others more than a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import cast

import numpy as np

from .plan import StepPlan, StepResult
from .scheduling import results
from .scheduling import step as steps
from .scheduling.admission import AdmissionError, QueueFullError, WaitingQueue, check_fits
from .scheduling.batch_state import DECODE, BatchState
from .scheduling.limits import GroupLimits, SchedulerConfig
from .scheduling.policy import precedence, step_header
from .scheduling.request import Request, RequestState, SequenceUpdate
from .scheduling.steady import SteadyBatch

__all__ = [
    "AdmissionError",
    "GroupLimits",
    "QueueFullError",
    "Request",
    "Scheduler",
    "SchedulerConfig",
    "SequenceUpdate",
]

# Lengths whose blocks are remembered.
MOST_NEEDS = 1 << 15
# Names of their own, because looking up a member of an enum takes ten times as long.
WAITING, RUNNING, RETURNING, LEAVING, FINISHED = RequestState


class Scheduler:
    """Three verbs: `add` requests, `schedule` a step, `apply` its result; and `abort` or `finish` at any time.

    Args:
        config: the limits.
        clock: seconds; stamps `Request.first_scheduled`.

    Attributes:
        epoch: number of the membership, written into every header.
        num_preemptions: how many sequences lost their slot to others so far.
    """

    def __init__(self, config: SchedulerConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.epoch = 0
        self.num_preemptions = 0
        self._clock = clock
        self._group_needs = lru_cache(MOST_NEEDS)(config.group_needs)
        self._batch = BatchState(config)
        self._queue = WaitingQueue(config.policy)
        self._requests: dict[str, Request] = {}  # all that are not finished
        self._departed: dict[int, Request] = {}  # RETURNING and LEAVING by sequence id: tokens of theirs are in flight
        self._returning: list[Request] = []
        self._released: list[np.ndarray] = []  # places that workers must still forget, those that left together
        self._next_sequence_id = 0
        self._next_step = 0
        self._last_applied_step = -1
        self._rebuilt = False  # workers must be told the whole batch, once
        self._steady: SteadyBatch | None = None

    # --- requests ----------------------------------------------------------------------------------------------------
    def add(self, request: Request) -> None:
        """Queue `request`, or raise AdmissionError if it can never run, QueueFullError if too many wait."""
        if request.request_id in self._requests:
            raise AdmissionError(f"request_id {request.request_id!r} is already in use; choose another")
        max_length = check_fits(len(request.prompt_token_ids), request.params.max_tokens, self.config)
        taken = len(self._requests) - len(self._departed) + len(self._returning)  # num_running + num_waiting
        if taken >= self.config.most_requests:
            raise QueueFullError(
                f"{self.num_running} requests run and {self.num_waiting} wait already, and max_queued_requests is "
                f"{self.config.max_queued_requests}; try again later or raise it"
            )
        assert request.prompt_token_ids.dtype == np.int32, "tokens travel as the bytes that they are"
        request.max_length = max_length
        request.awaits_mask = request.params.structured is not None
        request.sampling = steps.sampling_state(request, self.config.eos_token_ids)
        request.state = WAITING
        self._requests[request.request_id] = request
        self._queue.push(request)

    def abort(self, request_id: str) -> bool:
        """Forget a request in any state and free what it holds; False if there is no such request (any more)."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._forget([request])
        return True

    def finish(self, request_id: str) -> bool:
        """End a request whose text is complete (a stop string); tokens in flight are ignored. Returns as `abort`."""
        return self.abort(request_id)

    def release(self, request_id: str, mask: bytes | None) -> bool:
        """Give a constrained request the mask of its next token, once a token; False if there is no such request.

        Args:
            request_id: in any state; one that left meanwhile is no mistake.
            mask: see `TokenMask.words`; None allows all tokens.

        Raises:
            ValueError: the mask allows nothing.
            RuntimeError: the request has its next mask, or needs none.
        """
        if (request := self._requests.get(request_id)) is None:
            return False
        if not request.awaits_mask:
            raise RuntimeError(f"request {request_id!r} does not wait for a mask")
        if mask is not None and not any(mask):
            raise ValueError(f"the mask of request {request_id!r} allows no token")
        request.mask, request.awaits_mask = mask, False
        if request.state is RUNNING:
            self._batch.held[request.rank, request.slot] = False
        return True

    # --- planning ----------------------------------------------------------------------------------------------------
    def schedule(self) -> StepPlan | None:
        """Plan the next step of all ranks and book it as done; None when there is nothing to run now."""
        if (plan := self._plan_steady()) is not None:
            self._next_step += 1
            return plan
        plan = self._plan(snapshot=self._rebuilt)
        self._rebuilt = False
        return plan

    def snapshot(self) -> StepPlan:
        """Plan the next step in a form that rebuilds every rank's batch from nothing (see `StepHeader.snapshot`).

        It restores slots, tokens, lengths, sampling state and block tables, and then runs the step; KV itself is not
        in it. All results must have been applied. With nothing to run it is an idle step that empties the batches.
        """
        if self.num_in_flight:
            raise RuntimeError(f"{self.num_in_flight} steps are in flight; apply their results before a snapshot")
        plan = self._plan(snapshot=True)
        assert plan is not None
        return plan

    def _plan_steady(self) -> StepPlan | None:
        """Plan a step that leaves nothing to decide; None, with nothing planned, where something may have to be."""
        if self._rebuilt or self._queue or self._returning or self._released:
            return None
        if self._steady is None or not self._steady.holds(self._batch):
            self._steady = SteadyBatch(self._batch)
        return self._steady.plan(self._batch, step=self._next_step, epoch=self.epoch)

    def _plan(self, *, snapshot: bool) -> StepPlan | None:
        batch = self._batch
        self._let_go()
        self._take_back()
        batch.free_passed()
        if snapshot:  # every sequence that runs is named in it, and those that sit out are when they run again
            batch.reenter(batch.held & (batch.phase == DECODE))
        decodes = self._make_room()
        admitted = self._admit(decodes)
        draft = steps.StepDraft(decodes, steps.draft_chunks(batch, decodes), steps.held_slots(batch))
        if draft.is_empty and not snapshot and not any(admitted):
            assert not self.num_running or batch.held.any(), "sequences are in slots, but none can run"
            return None
        grants = steps.commit(batch, draft)
        if snapshot:
            ranks = steps.snapshot_plans(batch, draft)
        else:
            released = steps.released_slots(batch, self._released)
            ranks = steps.delta_plans(draft, released=released, admitted=admitted, grants=grants)
        self._released = []
        way_of = self.config.way_of
        header = step_header(ranks, step=self._next_step, epoch=self.epoch, way_of=way_of, snapshot=snapshot)
        self._next_step += 1
        return StepPlan(header=header, ranks=ranks)

    def _let_go(self) -> None:
        """Free slots and blocks of sequences whose last token is planned: workers run steps in order."""
        batch = self._batch
        ends = (batch.phase == DECODE) & (batch.computed >= batch.limit)
        if places := np.flatnonzero(ends).tolist():
            self._depart(cast(list[Request], [batch.requests[place] for place in places]), LEAVING)

    def _take_back(self) -> None:
        """Queue preempted requests all of whose tokens are known by now."""
        for request in [r for r in self._returning if r.last_step <= self._last_applied_step]:
            self._returning.remove(request)
            del self._departed[request.sequence_id]
            request.settle()
            request.state = WAITING
            self._queue.push(request)

    def _make_room(self) -> steps.Decodes:
        """Return who decodes, after preempting where a rank has too few blocks for it."""
        batch = self._batch
        decodes = steps.all_decodes(batch, (batch.phase == DECODE) & ~batch.held)
        short = np.flatnonzero(decodes.num_growing > batch.free_blocks.min(0)).tolist()
        if not short:
            return decodes
        decoding, growing = decodes.places, batch.growing(decodes.places)
        for rank in short:
            while growing[rank].sum() > batch.free_blocks[:, rank].min():
                victim = max(batch.running(rank), key=lambda request: precedence(request, self.config.policy))
                decoding[rank, victim.slot] = growing[rank, victim.slot] = False
                self._depart([victim], RETURNING)
                self._returning.append(victim)
                victim.num_preemptions += 1
                self.num_preemptions += 1
        return steps.all_decodes(batch, decoding)

    def _admit(self, decodes: steps.Decodes) -> list[list[Request]]:
        """Place waiting requests in strict order, until one has no room; return those of each rank."""
        admitted: list[list[Request]] = [[] for _ in range(self.config.num_ranks)]
        if not self._queue:
            return admitted
        blocked = np.zeros(self.config.num_ranks, np.bool_)
        blocked[[request.rank for request in self._returning]] = True  # their blocks are not for those behind them
        loads = steps.rank_loads(self._batch, num_growing=decodes.num_growing, blocked=blocked)
        waiting = self._queue.first(sum(loads.free_slots))
        seats = steps.place_in_order(waiting, loads, self.config, self._group_needs)
        num_placed = len(seats.requests)
        if not num_placed:
            return admitted
        self._queue.drop(num_placed)
        self._batch.occupy(seats, self._next_sequence_id)
        self._next_sequence_id += num_placed
        now = self._clock()
        for request, rank in zip(seats.requests, seats.ranks, strict=True):
            request.state = RUNNING
            request.first_scheduled = request.first_scheduled or now
            admitted[rank].append(request)
        return admitted

    # --- results -----------------------------------------------------------------------------------------------------
    def apply(self, result: StepResult) -> Sequence[SequenceUpdate]:
        """Book the outcome of the oldest step in flight; return one update for each sequence that it brought on.

        They have to be looked at before anything else is asked of the scheduler (see `StepUpdates`).
        """
        if result.step != self._last_applied_step + 1 or not self.num_in_flight:
            raise RuntimeError(f"result of step {result.step}, but step {self._last_applied_step + 1} is next")
        self._last_applied_step = result.step
        came = results.read(result, self._batch, self._departed)
        if came.places.size:
            self._batch.log.write(came.places, came.tokens, self._batch.requests)
        self._forget([update.request for update in came.updates if update.finish_reason is not None])
        return results.StepUpdates(self._batch, came) if came.goes_on.any() else came.updates

    # --- leaving -----------------------------------------------------------------------------------------------------
    def _depart(self, requests: Sequence[Request], state: RequestState) -> None:
        """Take running requests out of their slots while tokens of them may be in flight."""
        self._vacate(requests)
        for request in requests:
            request.state = state
            request.last_step = self._next_step - 1
            self._departed[request.sequence_id] = request

    def _forget(self, requests: Sequence[Request]) -> None:
        """Free whatever `requests` hold, in any state."""
        if running := [request for request in requests if request.state is RUNNING]:
            self._vacate(running)
        for request in requests:
            state = request.state
            if state is WAITING:
                self._queue.remove(request)
            elif state is not RUNNING:
                del self._departed[request.sequence_id]
                if state is RETURNING:
                    self._returning.remove(request)
            request.state = FINISHED
            del self._requests[request.request_id]

    def _vacate(self, requests: Sequence[Request]) -> None:
        self._released.append(self._batch.vacate(requests))

    # --- books when idle ---------------------------------------------------------------------------------------------
    def residue(self) -> str | None:
        """Say what is left where nothing should be, with no work and nothing in flight; None when the books balance."""
        if left := len(self._requests) + len(self._departed) + self.num_waiting:
            return f"{left} requests are booked"
        return self._batch.residue()

    def rebuild(self) -> None:
        """Begin with empty books, whatever is in them; the next plan is a snapshot, so workers forget too.

        For an idle engine: nothing may be in flight.
        """
        if self.num_in_flight:
            raise RuntimeError(f"{self.num_in_flight} steps are in flight; apply their results before a rebuild")
        self._batch, self._steady = BatchState(self.config), None
        self._queue = WaitingQueue(self.config.policy)
        self._requests, self._departed, self._returning = {}, {}, []
        self._released = []
        self._rebuilt = True

    # --- figures -----------------------------------------------------------------------------------------------------
    @property
    def num_running(self) -> int:
        """Sequences in slots."""
        return len(self._requests) - len(self._queue) - len(self._departed)

    @property
    def num_waiting(self) -> int:
        """Requests without a slot that still want one."""
        return len(self._queue) + len(self._returning)

    @property
    def num_in_flight(self) -> int:
        """Steps planned whose results have not been applied."""
        return self._next_step - 1 - self._last_applied_step

    @property
    def has_work(self) -> bool:
        """True while a request is unfinished or a step is in flight."""
        return bool(self._requests) or self.num_in_flight > 0

    @property
    def running_per_rank(self) -> tuple[int, ...]:
        """Sequences in slots of each rank."""
        return tuple(np.count_nonzero(self._batch.phase, axis=1).tolist())

    @property
    def fullest_groups(self) -> tuple[tuple[int, int], ...]:
        """KV blocks in use and in all on each rank, of the cache group that is used most."""
        return self._batch.fullest_groups()

    @property
    def used_blocks_per_rank(self) -> tuple[int, ...]:
        """KV blocks in use on each rank, of the cache group that is used most."""
        return tuple(used for used, _ in self.fullest_groups)

    def check_invariants(self) -> None:
        """Raise AssertionError when queue, batch and books contradict each other."""
        self._batch.check_invariants()
        self._queue.check_invariants()
        by_state = {state: 0 for state in RequestState}
        for request_id, request in self._requests.items():
            assert request.request_id == request_id
            by_state[request.state] += 1
            assert not request.num_generated or request.num_tokens < request.max_length, (
                f"{request_id} has all its tokens"
            )
        assert by_state[FINISHED] == 0
        assert by_state[WAITING] == len(self._queue)
        assert by_state[RUNNING] == self.num_running == np.count_nonzero(self._batch.phase)
        assert by_state[RETURNING] == len(self._returning)
        assert by_state[RETURNING] + by_state[LEAVING] == len(self._departed)
        for sequence_id, request in self._departed.items():
            assert request.sequence_id == sequence_id
            assert request.state in (RETURNING, LEAVING)
            if request.state is LEAVING:
                assert request.last_step > self._last_applied_step, f"{request.request_id} never got its last token"
        released = np.concatenate(self._released) if self._released else np.empty(0)
        assert len(np.unique(released)) == len(released), "a slot was released twice between two plans"
        if not self._requests:
            assert not any(self.used_blocks_per_rank), "blocks are in use, but nobody holds them"
