"""`Engine`: the three verbs in one loop body. Plan a step, run it on all ranks, book what came of it.

Not a process (runtime/engine_main.py) and not a decision (runtime/scheduler.py). No torch here.
Units: seconds, tokens. Two steps are in flight when there is work: one runs, the next one waits at the workers.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from .deltas import TokenText, logprob_entries, prompt_entries
from .grammar_masks import GrammarMasks, MadeMask
from .messages import INVALID_REQUEST, QUEUE_FULL, Delta, LogprobEntry, Submit, refusal
from .metrics.histogram import TOKEN_BOUNDS, Histogram
from .params import SamplingParams
from .plan import StepPlan, StepResult, unpack
from .rank_stats import BalanceStats
from .scheduler import Scheduler
from .scheduling.admission import QueueFullError
from .scheduling.request import Request, SequenceUpdate
from .step_recorder import StepRecorder
from .text_output import Shown

log = logging.getLogger(__name__)

DEPTH = 2
# The loop waits so long for masks that were just asked for: a step runs meanwhile, and they need some microseconds.
MASK_PATIENCE_S = 0.002
# With nothing else to do it waits longer, but still looks for commands.
IDLE_WAIT_S = 0.02


class BooksError(RuntimeError):
    """An idle engine holds what belongs to nobody; raised only where errors are wanted (tests)."""


class StepRunner(Protocol):
    """What the engine asks of a group of ranks (runtime/processes/workers.py)."""

    @property
    def in_flight(self) -> int:
        """Steps submitted and not yet collected."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Send every rank its part."""
        ...

    def collect(self, timeout: float | None = None) -> StepResult | None:
        """Return the oldest result, or None when it did not come in time."""
        ...


class PlanMarker(Protocol):
    """What the engine asks of live balancing (runtime/rebalancing/balancer.py)."""

    def mark(self, plan: StepPlan) -> StepPlan:
        """Return `plan` with the placement of experts that holds in it."""
        ...

    def stats(self) -> BalanceStats:
        """Return what was done so far."""
        ...


class TextStream(Protocol):
    """What the engine asks of the text side of one request (runtime/text_output.py)."""

    def add(self, token_ids: list[int], finish_reason: str | None) -> Shown:
        """Return new text and whether a stop string is complete."""
        ...


@dataclass(slots=True)
class _Live:
    request: Request
    text: TextStream
    is_plain: bool  # while it runs its deltas are tokens and text, and nobody else has to hear of them
    prompt_told: bool = False


class Engine:
    """Requests in, deltas out.

    Args:
        scheduler: decides.
        workers: a group of ranks, or a stand-in.
        make_text: the text side of a new request; raises ValueError for what it cannot do.
        token_text: text of one token, for log-probabilities; None when there is no tokenizer.
        seeds: draws the seed of a request that has none.
        masks: follow grammars; None refuses requests that have one.

    Attributes:
        recorder: records steps; None: nobody traces.
        balancer: moves experts; None where they stay.
        step_tokens: steps by their rows on all ranks; those without any are not counted.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        workers: StepRunner,
        *,
        make_text: Callable[[SamplingParams], TextStream],
        token_text: TokenText | None,
        seeds: Callable[[], int],
        masks: GrammarMasks | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.workers = workers
        self.balancer: PlanMarker | None = None
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.step_tokens = Histogram(TOKEN_BOUNDS)
        self.recorder: StepRecorder | None = None
        self._make_text = make_text
        self._token_text = token_text
        self._seeds = seeds
        self._masks = masks
        self._live: dict[str, _Live] = {}

    @property
    def has_work(self) -> bool:
        """True while a request is unfinished or a step is in flight."""
        return self.workers.in_flight > 0 or self.scheduler.has_work

    def add(self, submit: Submit) -> Delta | None:
        """Queue a request; one that cannot be taken is answered with an error and disturbs no other."""
        params = submit.params
        request = Request(
            request_id=submit.request_id,
            prompt_token_ids=unpack(submit.prompt_token_ids),
            params=params,
            seed=params.seed if params.seed is not None else self._seeds(),
            priority=submit.priority,
            arrival=time.monotonic(),
        )
        try:
            if params.n != 1 or params.bad_words:
                raise ValueError("an engine takes one choice a request, and bad words as tokens; see checked_params")
            text = self._make_text(params)
            if params.structured is not None and self._masks is None:
                raise ValueError("structured output needs text, but the server works without a tokenizer; leave it out")
            self.scheduler.add(request)
        except ValueError as error:
            code = QUEUE_FULL if isinstance(error, QueueFullError) else INVALID_REQUEST
            return refusal(submit.request_id, str(error), code)
        is_plain = params.structured is None and params.prompt_logprobs is None
        self._live[request.request_id] = _Live(request, text, is_plain)
        if self._masks is not None and params.structured is not None:
            self._masks.open(request.request_id, params.structured, may_end=_may_end(request))
        return None

    def abort(self, request_ids: tuple[str, ...]) -> list[Delta]:
        """Forget requests; unknown ids are ignored."""
        known = [request_id for request_id in request_ids if self._live.pop(request_id, None) is not None]
        for request_id in known:
            self.scheduler.abort(request_id)
            self._close_mask(request_id)
        return [Delta(request_id=request_id, finish_reason="abort") for request_id in known]

    def step(self, timeout: float | None = None) -> list[Delta]:
        """Put one more step in flight, or collect the oldest; empty when it did not end within `timeout` seconds."""
        ended = self._take_masks(MASK_PATIENCE_S)
        recorder = self.recorder
        if recorder is not None:
            recorder.turn()
        if self.workers.in_flight < DEPTH and (plan := self.scheduler.schedule()) is not None:
            if self.balancer is not None:
                plan = self.balancer.mark(plan)
            if recorder is not None:
                plan = recorder.planned(plan)
            self.workers.submit(plan)
            if recorder is not None:
                recorder.handed_over(plan.header.step)
            self.num_prompt_tokens += sum(chunk.num_tokens for rank in plan.ranks for chunk in rank.chunks)
            if self.workers.in_flight < DEPTH:
                return ended
        if not self.workers.in_flight:
            return ended or self._take_masks(IDLE_WAIT_S, for_any=True)
        result = self.workers.collect(timeout)
        if result is None:
            return ended
        self.num_steps += 1
        if result.num_rows:
            self.step_tokens.observe(result.num_rows)
        if recorder is not None:
            recorder.collected(result.step)
        deltas = self._deltas(self.scheduler.apply(result))
        if recorder is not None:
            recorder.booked(result.step)
        return ended + deltas

    def settle(self, *, strict: bool = False) -> list[Delta]:
        """Check the books when the engine has fallen idle, and mend them: a leak costs capacity, not the engine.

        Args:
            strict: raise BooksError instead.

        Returns:
            The end of requests that the scheduler lost, if any.
        """
        residue = self.scheduler.residue()
        if residue is None and self._live:
            residue = f"{len(self._live)} requests wait for tokens that nobody makes"
        if residue is None and self._masks is not None and self._masks.num_open:
            residue = f"grammars of {self._masks.num_open} requests are followed that have ended"
        if residue is None:
            return []
        if strict:
            raise BooksError(f"the books of the idle engine do not balance: {residue}")
        log.error("the books of the idle engine do not balance: %s; starting with empty ones", residue)
        self.scheduler.rebuild()
        lost, self._live = list(self._live), {}
        if self._masks is not None:
            self._masks.close_all()
        return [Delta(request_id=name, finish_reason="error", error="the engine lost this request") for name in lost]

    def _deltas(self, updates: Iterable[SequenceUpdate]) -> list[Delta]:
        deltas = []
        for update in updates:
            request, reason = update.request, update.finish_reason
            live = self._live[request.request_id]
            shown = live.text.add(update.token_ids, reason)
            if reason is None and live.is_plain and shown.stop is None and not update.logprobs:  # nearly all of them
                delta = Delta(
                    request_id=request.request_id,
                    token_ids=tuple(update.token_ids),
                    text=shown.text,
                    first_scheduled=request.first_scheduled,
                    num_preemptions=request.num_preemptions,
                )
            else:
                delta = self._delta(live, update, shown)
            deltas.append(delta)
        return deltas

    def _delta(self, live: _Live, update: SequenceUpdate, shown: Shown) -> Delta:
        request, reason = update.request, update.finish_reason
        if shown.stop is not None:
            if reason is None:
                self.scheduler.finish(request.request_id)
            reason = "stop"
        if reason is not None:
            del self._live[request.request_id]
            self._close_mask(request.request_id)
        elif self._masks is not None and request.params.structured is not None and update.token_ids:
            self._masks.advance(request.request_id, update.token_ids, may_end=_may_end(request))
        return Delta(
            request_id=request.request_id,
            token_ids=tuple(update.token_ids[: shown.num_tokens]),
            text=shown.text,
            logprobs=tuple(logprob_entries(entry, self._token_text) for entry in update.logprobs[: shown.num_tokens]),
            prompt_logprobs=self._prompt_entries(live, update) if request.params.prompt_logprobs is not None else (),
            finish_reason=reason,
            stop_reason=shown.stop or (self._stop_token(update) if reason == "stop" else None),
            error=update.error,
            first_scheduled=request.first_scheduled,
            num_preemptions=request.num_preemptions,
        )

    def _prompt_entries(self, live: _Live, update: SequenceUpdate) -> tuple[tuple[LogprobEntry, ...], ...]:
        """Return what became known of the prompt; its first token has nothing, and is told with what comes first."""
        first: tuple[tuple[LogprobEntry, ...], ...] = () if live.prompt_told else ((),)
        live.prompt_told = True
        pieces = [prompt_entries(piece, self._token_text) for piece in update.prompt_logprobs]
        return first + tuple(itertools.chain.from_iterable(pieces))

    def _stop_token(self, update: SequenceUpdate) -> int | None:
        """Return the stop token of the request that ended it; None for an end token of the model."""
        last, params = update.token_ids[-1], update.request.params
        is_end = not params.ignore_eos and last in self.scheduler.config.eos_token_ids
        return last if last in params.stop_token_ids and not is_end else None

    # --- grammars ----------------------------------------------------------------------------------------------------
    def _close_mask(self, request_id: str) -> None:
        if self._masks is not None:
            self._masks.close(request_id)

    def _take_masks(self, wait_s: float, *, for_any: bool = False) -> list[Delta]:
        """Let those go on whose mask has come; return the ends of those that are complete or cannot go on."""
        if self._masks is None or not self._masks.num_pending:
            return []
        ended = []
        for made in self._masks.collect(wait_s, for_any=for_any):
            if made.error is None and not made.finished:
                self.scheduler.release(made.request_id, made.mask)
            else:
                ended.append(self._end(made))
        return ended

    def _end(self, made: MadeMask) -> Delta:
        """End a request whose grammar is complete, or failed."""
        live = self._live.pop(made.request_id)
        self.scheduler.abort(made.request_id)
        self._close_mask(made.request_id)
        if made.error is not None:
            return Delta(request_id=made.request_id, finish_reason="error", error=made.error, error_code=made.code)
        shown = live.text.add([], "length")  # what was held back because a stop string might begin there
        return Delta(
            request_id=made.request_id,
            text=shown.text,
            finish_reason="stop",
            first_scheduled=live.request.first_scheduled,
            num_preemptions=live.request.num_preemptions,
        )


def _may_end(request: Request) -> bool:
    """Tell whether an end token may be the next token of `request`, as far as its sampling parameters go."""
    return not request.params.ignore_eos and request.num_generated >= request.params.min_tokens
