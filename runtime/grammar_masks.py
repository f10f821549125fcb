"""Masks of constrained requests, made by a few threads beside the engine's loop.

Not the grammars (text/grammar.py) and not who may run when (`Scheduler.release`). The loop hands over what a request
generated and picks up masks; the threads compile, follow and fill. What goes wrong in a grammar ends its request only.
Units: seconds. Masks: see `TokenMask.words`; None allows all tokens.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

from ..text import Tokenizer
from ..text.grammar import GrammarStuck, GrammarTokens
from ..text.grammar_calls import AnswerOrCalls
from ..text.grammar_thinking import ThinkingMatcher
from .messages import GRAMMAR_STUCK, INVALID_GRAMMAR
from .params import StructuredSpec

log = logging.getLogger(__name__)

# Masks and compiling have threads of their own: nobody's next token waits for the grammar of a newcomer.
NUM_MASK_THREADS, NUM_COMPILE_THREADS = 2, 2
# A grammar that works on one token for so long is given up; another thread takes the place of the one it keeps.
PATIENCE_S = 10.0
MOST_LOST_THREADS = 8


class TextMatcher(Protocol):
    """What is asked of a grammar (text/grammar.py: Matcher)."""

    @property
    def finished(self) -> bool:
        """True when nothing may follow."""
        ...

    def accept(self, token_id: int) -> None:
        """Go on by one token."""
        ...

    def mask(self, *, may_end: bool = True) -> bytes | None:
        """Return which tokens may come next."""
        ...


@dataclass(frozen=True, kw_only=True)
class MadeMask:
    """What became of one request: a mask, its end, or an error.

    Attributes:
        request_id: whose.
        mask: for the next token; None allows all.
        finished: the text is complete, there is no next token.
        error: why it cannot go on.
        code: with an error, where the request is to blame: INVALID_GRAMMAR if its grammar was never usable,
            GRAMMAR_STUCK if the text got to where the grammar lets nothing follow.
    """

    request_id: str
    mask: bytes | None = None
    finished: bool = False
    error: str | None = None
    code: str | None = None


@dataclass(eq=False, slots=True)
class _Job:
    """What one request waits for."""

    request_id: str
    spec: StructuredSpec
    matcher: TextMatcher | None = None
    tokens: list[int] = field(default_factory=list)
    may_end: bool = True
    started: float = 0.0
    waited_for: bool = False
    threads: _Threads | None = None  # that have it


class _Threads:
    """Threads that do one kind of job, begun at the first. A job that is given up keeps its thread; another is begun.

    Args:
        number: of them.
        work: does one job.
    """

    def __init__(self, number: int, work: Callable[[_Job], None]) -> None:
        self._number = number
        self._work = work
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._num_begun = 0
        self._num_lost = 0

    def submit(self, job: _Job) -> None:
        """Do a job when a thread is free."""
        while self._num_begun < self._number + min(self._num_lost, MOST_LOST_THREADS):
            threading.Thread(target=self._run, name="moewe-grammar", daemon=True).start()
            self._num_begun += 1
        self._jobs.put(job)

    def lose(self) -> None:
        """Count one thread as lost."""
        self._num_lost += 1

    def shutdown(self) -> None:
        """Let them end after the jobs at hand."""
        for _ in range(self._num_begun):
            self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._work(job)


class GrammarMasks:
    """One for an engine. All methods are the loop's; nothing here blocks it but `collect` for as long as it asks.

    Args:
        make_matcher: compiles; called in a thread, ValueError refuses the request.
    """

    def __init__(self, make_matcher: Callable[[StructuredSpec], TextMatcher]) -> None:
        self._make_matcher = make_matcher
        self._requests: dict[str, _Job] = {}  # all that are open
        self._pending: dict[str, _Job] = {}  # those of them that a thread works on, or will
        self._masking = _Threads(NUM_MASK_THREADS, self._work)
        self._compiling = _Threads(NUM_COMPILE_THREADS, self._work)
        self._done: queue.SimpleQueue[tuple[_Job, MadeMask]] = queue.SimpleQueue()

    @property
    def num_pending(self) -> int:
        """Requests that wait for a mask."""
        return len(self._pending)

    @property
    def num_open(self) -> int:
        """Requests that are followed."""
        return len(self._requests)

    def open(self, request_id: str, spec: StructuredSpec, *, may_end: bool) -> None:
        """Begin with a request; its first mask comes when the grammar is compiled."""
        job = self._requests[request_id] = _Job(request_id, spec, may_end=may_end, waited_for=True)
        self._submit(job)

    def advance(self, request_id: str, token_ids: list[int], *, may_end: bool) -> None:
        """Ask for the mask of the token after these; `may_end`: end tokens count from there on."""
        job = self._requests[request_id]
        job.tokens, job.may_end, job.waited_for = token_ids, may_end, False
        self._submit(job)

    def close(self, request_id: str) -> None:
        """Forget a request; unknown ids are ignored. What a thread still makes for it is dropped."""
        self._requests.pop(request_id, None)
        self._pending.pop(request_id, None)

    def close_all(self) -> None:
        """Forget all requests."""
        for request_id in list(self._requests):
            self.close(request_id)

    def collect(self, wait_s: float = 0.0, *, for_any: bool = False) -> list[MadeMask]:
        """Return what has been made, after waiting for at most `wait_s`.

        Args:
            wait_s: how long to wait for all who asked since the last call: nobody is waited for twice.
            for_any: wait for the first of all, for a loop that has nothing else to do.
        """
        made: list[MadeMask] = []
        deadline = time.monotonic() + wait_s
        while self._pending:
            waits = (for_any and not made) or any(not job.waited_for for job in self._pending.values())
            left = deadline - time.monotonic() if waits else 0.0
            try:
                job, mask = self._done.get(timeout=left) if left > 0 else self._done.get_nowait()
            except queue.Empty:
                break
            if self._pending.get(job.request_id) is job:  # else it was closed or given up meanwhile
                del self._pending[job.request_id]
                made.append(mask)
        for job in self._pending.values():
            job.waited_for = True
        return made + self._given_up()

    def _submit(self, job: _Job) -> None:
        job.started = 0.0
        self._pending[job.request_id] = job
        job.threads = self._compiling if job.matcher is None else self._masking
        job.threads.submit(job)

    def _given_up(self) -> list[MadeMask]:
        now = time.monotonic()
        late = [job for job in self._pending.values() if job.started and now - job.started > PATIENCE_S]
        for job in late:
            log.error("a grammar works on one token for more than %.0f s; its request ends", PATIENCE_S)
            del self._pending[job.request_id]
            assert job.threads is not None
            job.threads.lose()
        error = "the grammar is too complex for this text; make it simpler"
        return [MadeMask(request_id=job.request_id, error=error) for job in late]

    def _work(self, job: _Job) -> None:
        job.started = time.monotonic()
        self._done.put((job, self._make(job)))

    def _make(self, job: _Job) -> MadeMask:
        try:
            if job.matcher is None:
                job.matcher = self._make_matcher(job.spec)
            for token in job.tokens:
                job.matcher.accept(token)
            if job.matcher.finished:
                return MadeMask(request_id=job.request_id, finished=True)
            return MadeMask(request_id=job.request_id, mask=job.matcher.mask(may_end=job.may_end))
        except GrammarStuck as error:
            stuck = f"the text cannot go on as its grammar demands: {error}"
            return MadeMask(request_id=job.request_id, error=stuck, code=GRAMMAR_STUCK)
        except ValueError as error:
            code = INVALID_GRAMMAR if job.matcher is None else None
            text = f"the grammar cannot be used: {error}" if code else str(error)
            return MadeMask(request_id=job.request_id, error=text, code=code)
        except BaseException as error:  # a panic of the library, which no handler of Exception would catch
            log.exception("a grammar failed")
            return MadeMask(request_id=job.request_id, error=f"the grammar failed: {type(error).__name__}")

    def shutdown(self) -> None:
        """Let the threads end; for an engine that ends."""
        self._masking.shutdown()
        self._compiling.shutdown()


def grammar_matchers(
    tokenizer: Tokenizer, vocab_size: int, end_token_ids: Sequence[int]
) -> Callable[[StructuredSpec], TextMatcher]:
    """Return what compiles grammars for one model. Nothing is made of its vocabulary before the first of them."""
    lock = threading.Lock()

    @cache
    def tokens() -> GrammarTokens:
        return GrammarTokens(tokenizer, vocab_size, end_token_ids)

    def make(spec: StructuredSpec) -> TextMatcher:
        with lock:
            vocabulary = tokens()
        matcher = vocabulary.matcher(spec.kind, spec.text)
        call_id = tokenizer.single_token(spec.call_start)
        answer = matcher if call_id is None else AnswerOrCalls(matcher, call_id)
        if not spec.thinking_end:
            return answer
        start_id = tokenizer.single_token(spec.thinking_start)
        return ThinkingMatcher(
            answer, spec.thinking_end, opened=spec.thinking, start_id=start_id, token_bytes=tokenizer.token_bytes
        )

    return make
