"""When a grammar is tried, and who is told to come later: an answer within a second however many send hostile ones.

Not the trial (text/grammar_check.py). Each grammar is first tried for a moment, which is enough for nearly all that are
meant well; only what is not done by then goes to a second lane. A lane tries one at a time and takes those of different
clients in turn. Whoever cannot be served within PROMISE_S by what the last trials took of a core is refused at once;
so is a client that has lately taken more than its share, before it takes the second lane. Trials are counted in CPU and
not by the clock, so that on a busy machine, where everything takes longer, who means well waits and is not turned away.
What was tried costs nothing.
Everything here is the event loop's; trials run in threads.
Units: seconds; of CPU where a trial is meant.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Protocol

from ..text.grammar import GrammarError
from ..text.grammar_check import GrammarUndecided, Trial
from ..text.grammar_helper import CPU_SECONDS

PROMISE_S = 1.0
# As long as nothing was tried: the helper has to start.
FIRST_PROMISE_S = 5.0
# Of the clock, for a turn that was promised.
PATIENCE_S = 10.0
# Of CPU. Small schemas take 2 to 10 ms, one of 150 kB takes 50.
QUICK_CPU_S = 0.06
# What a trial is taken to need at least, so that a few fast ones let no endless queue in.
LEAST_QUICK_S, LEAST_LONG_S = 0.01, 0.1
# What one client may spend on grammars that need the second lane at once, and what comes back in a second.
MOST_CREDIT_S, CREDIT_A_SECOND_S = 2.5, 0.25
# Who goes on asking waits no longer than what this takes to come back.
MOST_DEBT_S = 2 * MOST_CREDIT_S
MOST_ASKERS = 4096
# A client that waits for nothing yet is let wait for its turn, whatever trials take, unless so many come before it.
FEW_TURNS = 3


class ComeLater(Exception):
    """A grammar is not tried now.

    Attributes:
        retry_after_s: whole seconds after which it may be.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = max(1, math.ceil(retry_after_s))


class Trials(Protocol):
    """What is asked of text/grammar_check.py."""

    def remembered(self, kind: str, text: str) -> str | None:
        """Return what is wrong with a grammar, empty when nothing is; None when nobody knows."""
        ...

    def check(self, kind: str, text: str, *, cpu_seconds: float = CPU_SECONDS) -> Trial:
        """Try it, in a thread."""
        ...


class GrammarQueue:
    """One for a server.

    Args:
        trials: does the work.
        clock: seconds that only grow.
    """

    def __init__(self, trials: Trials, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._trials = trials
        self._clock = clock
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="moewe-grammar-check")
        self._quick = Lane(LEAST_QUICK_S)
        self._long = Lane(LEAST_LONG_S, guess_s=CPU_SECONDS)
        self._credit = Credit(clock)
        self._trying: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._promise_s = FIRST_PROMISE_S

    async def check(self, kind: str, text: str, asker: str) -> None:
        """Return when a grammar can be used.

        Args:
            kind, text: see `grammar_source` in text/grammar.py.
            asker: who sends it.

        Raises:
            GrammarError: it cannot.
            ComeLater: it is not tried now.
            GrammarUntried: nobody could say.
        """
        key = (kind, text)
        while True:
            problem = self._trials.remembered(kind, text)
            if problem is not None:
                if problem:
                    raise GrammarError(problem)
                return
            trial = self._trying.get(key)
            own = trial is None
            if trial is None:
                trial = self._trying[key] = asyncio.ensure_future(self._tried(kind, text, asker))
                trial.add_done_callback(_looked_at)
            await asyncio.wait((trial,))  # and leave it alone when this client goes away
            error = trial.exception()
            if isinstance(error, ComeLater) and not own:
                continue  # that was the turn of somebody else
            if error is not None:
                raise error
            return

    async def _tried(self, kind: str, text: str, asker: str) -> None:
        until = self._clock() + self._promise_s
        try:
            trial = await self._quick_trial(kind, text, asker, until)
            if trial is None:
                trial = await self._long_trial(kind, text, asker, until)
        finally:
            del self._trying[kind, text]
        if trial.problem:
            raise GrammarError(trial.problem)

    async def _quick_trial(self, kind: str, text: str, asker: str, until: float) -> Trial | None:
        """Return what a short trial finds; None where it takes longer."""
        async with self._quick.place(asker, until - self._clock()):
            try:
                trial = await self._in_thread(kind, text, QUICK_CPU_S)
            except GrammarUndecided:
                self._quick.took(QUICK_CPU_S)
                self._credit.spend(asker, QUICK_CPU_S)
                return None
            self._quick.took(trial.cpu_seconds)
            return trial

    async def _long_trial(self, kind: str, text: str, asker: str, until: float) -> Trial:
        self._credit.check(asker)
        async with self._long.place(asker, until - self._clock()):
            took_s = CPU_SECONDS  # where nobody can say
            try:
                trial = await self._in_thread(kind, text, CPU_SECONDS)
                took_s = trial.cpu_seconds
                return trial
            finally:
                self._long.took(took_s)
                self._credit.spend(asker, took_s)

    async def _in_thread(self, kind: str, text: str, cpu_seconds: float) -> Trial:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(
                self._threads, lambda: self._trials.check(kind, text, cpu_seconds=cpu_seconds)
            )
        finally:
            self._promise_s = PROMISE_S


def _looked_at(done: asyncio.Task[None]) -> None:
    """Take the error of a trial for which nobody waits any more."""
    if not done.cancelled():
        done.exception()


class Lane:
    """One place, and those who wait for it: one of each client in turn.

    Args:
        least_s: CPU that a trial is taken to need at least.
        guess_s: what it is taken to need before there was any.
    """

    def __init__(self, least_s: float, *, guess_s: float = 0.0) -> None:
        self._least_s = least_s
        self._took_s = max(guess_s, least_s)
        self._taken = False
        self._served = ""  # who had the last turn
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        """Those who wait for the place."""
        return sum(map(len, self._waiting.values()))

    def took(self, cpu_seconds: float) -> None:
        """Learn from a trial how long the next ones may take."""
        self._took_s = max(self._least_s, 0.75 * self._took_s + 0.25 * cpu_seconds)

    @asynccontextmanager
    async def place(self, asker: str, within_s: float) -> AsyncIterator[None]:
        """Hold the place.

        Args:
            asker: whose turn counts.
            within_s: when holding it must be over, on a machine with nothing else to do.

        Raises:
            ComeLater: it would not be, or not even PATIENCE_S brought the turn.
        """
        if self._taken:
            await self._wait(asker, within_s)
        self._taken, self._served = True, asker
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, asker: str, within_s: float) -> None:
        before = self._before(asker)
        wait_s = (1 + before) * self._took_s
        welcome = asker not in self._waiting and before < FEW_TURNS
        if not welcome and wait_s + self._took_s > within_s:
            raise self._full(wait_s)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(asker, deque()).append(turn)
        try:
            await asyncio.wait((turn,), timeout=PATIENCE_S)
        except asyncio.CancelledError:
            self._give_up(asker, turn)
            raise
        if not turn.done():
            self._give_up(asker, turn)
            raise self._full(self._took_s)

    def _before(self, asker: str) -> int:
        """Count those whose turn comes before that of one more of this client."""
        own = len(self._waiting.get(asker, ()))
        others = [min(len(turns), own + 1) for name, turns in self._waiting.items() if name != asker]
        return own + sum(others) - (asker != self._served and self._served in self._waiting)

    def _full(self, wait_s: float) -> ComeLater:
        return ComeLater(f"{self.num_waiting} grammars wait to be checked; try again later", wait_s)

    def _give_up(self, asker: str, turn: asyncio.Future[None]) -> None:
        if turn.done():
            self._pass_on()
            return
        self._waiting[asker].remove(turn)
        if not self._waiting[asker]:
            del self._waiting[asker]

    def _pass_on(self) -> None:
        """Give the place to the next; it stays taken meanwhile."""
        if not self._waiting:
            self._taken = False
            return
        asker = next((name for name in self._waiting if name != self._served), self._served)
        turns = self._waiting.pop(asker)
        self._served = asker
        turns.popleft().set_result(None)
        if turns:
            self._waiting[asker] = turns


class Credit:
    """What each client may still spend.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._debts: OrderedDict[str, tuple[float, float]] = OrderedDict()  # debt, and when it was that

    def check(self, asker: str) -> None:
        """Refuse a client that has spent all of its credit."""
        over = self._debt(asker) - MOST_CREDIT_S
        if over >= 0:
            text = "grammars from this client took much time to check lately; simplify them, or try again later"
            raise ComeLater(text, (over + CPU_SECONDS) / CREDIT_A_SECOND_S)

    def spend(self, asker: str, seconds: float) -> None:
        """Charge a client."""
        self._debts[asker] = (min(self._debt(asker) + seconds, MOST_DEBT_S), self._clock())
        self._debts.move_to_end(asker)
        while len(self._debts) > MOST_ASKERS:
            self._debts.popitem(last=False)

    def _debt(self, asker: str) -> float:
        debt, when = self._debts.get(asker, (0.0, 0.0))
        return max(0.0, debt - CREDIT_A_SECOND_S * (self._clock() - when))
