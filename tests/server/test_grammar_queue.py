"""Which grammar is tried when, with trials that end when the test says so and a clock that goes when it says so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from moewe.server import grammar_queue
from moewe.server.asker import ASKER, asker_of
from moewe.server.grammar_queue import ComeLater, Credit, GrammarQueue, Lane
from moewe.text.grammar import GrammarError
from moewe.text.grammar_check import GrammarUndecided, GrammarUntried, Trial
from moewe.text.grammar_helper import CPU_SECONDS
from tests.support.asking import error_of, fake, post
from tests.support.fake_replicas import make_state

QUICK, LONG = grammar_queue.QUICK_CPU_S, CPU_SECONDS


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Compiler:
    """Texts with `slow` in them need the long trial, those with `bad` are refused, `late` nobody can try.

    Trials wait for `go`; each takes `took` of a core, or its limit if that is less, and `busy` times that by the clock.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.tried: list[tuple[str, float]] = []
        self.verdicts: dict[str, str] = {}
        self.go = threading.Event()
        self.go.set()
        self.took, self.busy = 0.01, 1.0

    def remembered(self, kind: str, text: str) -> str | None:
        return self.verdicts.get(text)

    def check(self, kind: str, text: str, *, cpu_seconds: float = CPU_SECONDS) -> Trial:
        assert self.go.wait(20)
        self.tried.append((text, cpu_seconds))
        took = min(self.took, cpu_seconds)
        self.clock.now += took * self.busy
        if "late" in text:
            raise GrammarUntried("nobody is there")
        if "slow" in text and cpu_seconds < CPU_SECONDS:
            raise GrammarUndecided
        self.verdicts[text] = "no" if "bad" in text else ""
        return Trial(self.verdicts[text], took)


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def outcome(work: Coroutine[Any, Any, Any]) -> str:
    try:
        await work
        return "fine"
    except (GrammarError, ComeLater, GrammarUntried) as error:
        return type(error).__name__


def run(work: Callable[[GrammarQueue, Compiler, Clock], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        clock = Clock()
        compiler = Compiler(clock)
        await asyncio.wait_for(work(GrammarQueue(compiler, clock=clock), compiler, clock), 30)

    asyncio.run(main())


def test_a_short_trial_is_enough_for_most_and_verdicts_are_asked_first() -> None:
    async def work(queue: GrammarQueue, compiler: Compiler, _: Clock) -> None:
        assert await outcome(queue.check("json", "a", "x")) == "fine"
        assert await outcome(queue.check("json", "bad", "x")) == "GrammarError"
        assert await outcome(queue.check("json", "slow", "x")) == "fine"
        assert await outcome(queue.check("json", "late", "x")) == "GrammarUntried"
        assert compiler.tried == [("a", QUICK), ("bad", QUICK), ("slow", QUICK), ("slow", LONG), ("late", QUICK)]
        compiler.tried.clear()
        found = [await outcome(queue.check("json", text, "x")) for text in ("a", "bad", "slow")]
        assert (found, compiler.tried) == (["fine", "GrammarError", "fine"], [])

    run(work)


def test_of_64_attackers_at_once_most_are_told_at_once_and_a_stranger_is_served() -> None:
    async def work(queue: GrammarQueue, compiler: Compiler, clock: Clock) -> None:
        compiler.took = 0.05
        assert await outcome(queue.check("json", "before", "stranger")) == "fine"
        for number in range(12):  # so that the lane knows how long trials take
            await outcome(queue.check("json", f"bad before {number}", "attacker"))
        compiler.go.clear()
        attacks = [
            asyncio.ensure_future(outcome(queue.check("json", f"bad slow {number}", "attacker")))
            for number in range(64)
        ]
        await turns()
        assert not compiler.tried[13:]  # one waits within the compiler, and still:
        refused = [attack for attack in attacks if attack.done()]
        assert {attack.result() for attack in refused} == {"ComeLater"} and len(refused) >= 40
        stranger = asyncio.ensure_future(outcome(queue.check("json", "good", "stranger")))
        await turns()
        assert not stranger.done()
        compiler.go.set()
        assert await stranger == "fine"
        started = [text for text, seconds in compiler.tried[13:] if seconds == QUICK]
        assert started.index("good") == 1  # after the one at hand
        assert set(await asyncio.gather(*attacks)) <= {"ComeLater", "GrammarError"}

    run(work)


def test_where_trials_take_long_a_stranger_still_gets_its_turn() -> None:
    async def main() -> None:
        lane = Lane(0.01, guess_s=3.0)

        async def hold(asker: str) -> str:
            async with lane.place(asker, 1.0):
                return asker

        async with lane.place("a", 1.0):
            tasks = [asyncio.ensure_future(outcome(hold(asker))) for asker in "aabbcde"]
            await turns()
            waits = [not task.done() for task in tasks]
            assert waits == [True, False, True, False, True, True, False]
        assert [await task for task in tasks] == ["fine" if wait else "ComeLater" for wait in waits]

    asyncio.run(main())


def test_on_a_busy_machine_who_means_well_waits_and_is_not_refused() -> None:
    async def work(queue: GrammarQueue, compiler: Compiler, _: Clock) -> None:
        compiler.took, compiler.busy = 0.003, 40.0
        for number in range(12):
            assert await outcome(queue.check("json", f"before {number}", "x")) == "fine"
        compiler.go.clear()
        many = [asyncio.ensure_future(outcome(queue.check("json", f"good {number}", "x"))) for number in range(64)]
        await turns()
        assert not any(one.done() for one in many)
        compiler.go.set()
        assert set(await asyncio.gather(*many)) == {"fine"}

    run(work)


def test_who_gets_no_turn_at_all_is_told_to_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_queue, "PATIENCE_S", 0.03)

    async def work(queue: GrammarQueue, compiler: Compiler, _: Clock) -> None:
        compiler.go.clear()
        start = asyncio.ensure_future(outcome(queue.check("json", "start", "x")))
        await asyncio.sleep(0.1)
        assert not start.done()  # at the first the helper has to start
        compiler.go.set()
        assert await start == "fine"
        compiler.go.clear()
        first = asyncio.ensure_future(outcome(queue.check("json", "bad first", "x")))
        await turns()
        assert await outcome(queue.check("json", "second", "x")) == "ComeLater"  # after 0.03 s: the first does not end
        assert not first.done()  # it has its place, and is answered
        compiler.go.set()
        assert await first == "GrammarError"
        assert await outcome(queue.check("json", "second", "x")) == "fine"
        assert [text for text, _ in compiler.tried] == ["start", "bad first", "second"]

    run(work)


def test_one_trial_serves_all_who_send_the_same() -> None:
    async def work(queue: GrammarQueue, compiler: Compiler, _: Clock) -> None:
        compiler.go.clear()
        same = [asyncio.ensure_future(outcome(queue.check("json", "bad", str(number)))) for number in range(200)]
        await turns()
        same[0].cancel()  # the one who was first goes away
        await turns()
        compiler.go.set()
        assert set(await asyncio.gather(*same[1:])) == {"GrammarError"}
        assert compiler.tried == [("bad", QUICK)]

    run(work)


def test_a_client_that_spends_its_credit_waits_and_no_other_does() -> None:
    async def work(queue: GrammarQueue, compiler: Compiler, clock: Clock) -> None:
        compiler.took = LONG
        found = [await outcome(queue.check("json", f"bad slow {number}", "attacker")) for number in range(80)]
        assert found[0] == "GrammarError" and "ComeLater" in found[40:]
        queue._credit.spend("attacker", 2.5)
        with pytest.raises(ComeLater, match="took much time") as caught:
            await queue.check("json", "bad slow again", "attacker")
        assert 9 <= caught.value.retry_after_s <= 11
        assert await outcome(queue.check("json", "good", "attacker")) == "fine"  # the short trial is still its
        assert await outcome(queue.check("json", "slow good", "stranger")) == "fine"
        clock.now += caught.value.retry_after_s
        assert await outcome(queue.check("json", "bad slow again", "attacker")) == "GrammarError"

    run(work)


def test_turns_go_round_and_who_gives_up_leaves_no_hole() -> None:
    async def main() -> None:
        order = list[str]()
        lane = Lane(0.01)

        async def hold(asker: str, name: str) -> None:
            async with lane.place(asker, 1.0):
                order.append(name)
                await asyncio.sleep(0)

        async with lane.place("z", 1.0):
            names = ("a1", "a2", "a3", "b1", "b2", "c1")
            tasks = {name: asyncio.ensure_future(hold(name[0], name)) for name in names}
            await turns()
            assert lane.num_waiting == 6
            tasks["a2"].cancel()
            await turns()
            assert lane.num_waiting == 5
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert order == ["a1", "b1", "c1", "a3", "b2"] and lane.num_waiting == 0
        async with lane.place("a", 1.0):  # free again
            pass
        with pytest.raises(RuntimeError, match="mine"):
            async with lane.place("a", 1.0):
                raise RuntimeError("mine")
        async with lane.place("a", 1.0):
            pass

    asyncio.run(main())


def test_a_turn_that_comes_to_who_is_gone_goes_on_to_the_next() -> None:
    async def main() -> None:
        held = list[str]()
        lane = Lane(0.01)

        async def hold(name: str) -> None:
            async with lane.place(name, 1.0):
                held.append(name)

        async with lane.place("z", 1.0):
            gone, next_one = asyncio.ensure_future(hold("gone")), asyncio.ensure_future(hold("next"))
            await turns()
        gone.cancel()  # it has been given the place, and has not run since
        await asyncio.wait_for(next_one, 10)
        assert held == ["next"]

    asyncio.run(main())


def test_credit_forgets_old_debts_and_few_clients_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    credit = Credit(clock)
    credit.spend("a", 3.5)
    with pytest.raises(ComeLater):
        credit.check("a")
    credit.check("b")
    clock.now += 4.1
    credit.check("a")
    monkeypatch.setattr(grammar_queue, "MOST_ASKERS", 2)
    for name in "cde":
        credit.spend(name, 1.0)
    assert list(credit._debts) == ["d", "e"]


@pytest.mark.parametrize(
    ("host", "same", "other"),
    [
        ("10.0.0.1", "10.0.0.1", "10.0.0.2"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::9", "2001:db8:1:3::4"),
        ("testclient", "testclient", ""),
    ],
)
def test_askers_are_told_apart_by_address_or_key(host: str, same: str, other: str) -> None:
    one, two = [(b"authorization", b"Bearer a")], [(b"authorization", b"Bearer b")]
    assert asker_of(one, host, keyed=False) == asker_of(two, same, keyed=False) != asker_of(one, other, keyed=False)
    assert asker_of(one, host, keyed=True) == asker_of(one, other, keyed=True) != asker_of(two, host, keyed=True)
    assert "Bearer a" not in asker_of(one, host, keyed=True)


def test_over_http_a_full_queue_is_a_429_with_the_time_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    state = make_state(fake())
    seen: list[str] = []

    async def full(kind: str, text: str, asker: str) -> None:
        seen.append(asker)
        raise ComeLater("3 grammars wait to be checked; try again later", 1.2)

    monkeypatch.setattr(state.grammar_queue, "check", full)
    response = post(state, "/v1/completions", {"model": "gull", "prompt": "a", "guided_regex": "a"})
    assert (response.status_code, response.headers["retry-after"]) == (429, "2")
    assert error_of(response)["code"] == "queue_full" and seen == ["127.0.0.1"]
    assert ASKER.get() == ""
