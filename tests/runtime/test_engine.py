"""The engine turns requests into deltas: in order and complete; an error stays with the request that caused it."""

from __future__ import annotations

import numpy as np
import pytest

from moewe.runtime.deltas import logprob_entries, seed_sequence
from moewe.runtime.engine import Engine
from moewe.runtime.messages import Submit
from moewe.runtime.params import SamplingParams
from moewe.runtime.plan import FINISH_ERROR, RankPlan, RankResult, StepResult, TokenLogprobs, pack, result_of_ranks
from moewe.runtime.ranks.batch import WorkerBatch
from moewe.runtime.scheduler import Scheduler, SequenceUpdate
from moewe.runtime.scheduling.limits import GroupLimits, SchedulerConfig
from moewe.runtime.text_output import Shown
from tests.support.fake_worker import VOCAB_SIZE

LIMITS = SchedulerConfig(
    num_ranks=2, groups=(GroupLimits(num_blocks=64),), block_size=4, max_model_len=128, max_num_seqs=4,
    max_num_batched_tokens=16, eos_token_ids=(500,),
)  # fmt: skip


class FakeGroup:
    """Ranks in this thread; results wait until they are collected. `late` collects come to nothing first."""

    def __init__(self, limits=LIMITS):
        self.batches = [
            WorkerBatch(num_slots=limits.max_num_seqs, max_model_len=limits.max_model_len, block_size=limits.block_size)
            for _ in range(limits.num_ranks)
        ]
        self.results = []
        self.plans = []
        self.late = 0
        self.ill = set()
        self.most_in_flight = 0

    @property
    def in_flight(self):
        return len(self.results)

    def submit(self, plan):
        self.plans.append(plan)
        for batch in self.batches if plan.header.snapshot else ():
            batch.apply(RankPlan(), snapshot=True)
        ranks = tuple(map(self._run, self.batches, plan.ranks))
        num_rows = sum(result.num_rows for result in ranks)
        self.results.append(StepResult(step=plan.header.step, ranks=ranks, num_rows=num_rows))
        self.most_in_flight = max(self.most_in_flight, len(self.results))

    def _run(self, batch, plan):
        batch.apply(plan)
        rows = batch.rows(plan.chunks, plan.held)
        tokens = (rows.input_ids[rows.sample_rows] + 1) % VOCAB_SIZE
        healthy = np.ones(batch.num_slots, np.bool_)
        healthy[[slot for slot in rows.sample_slots.tolist() if batch.last_token[slot] in self.ill]] = False
        flags = batch.commit(rows, tokens, healthy).flags
        assert set(flags[~healthy[rows.sample_slots]].tolist()) <= {FINISH_ERROR}
        return RankResult(
            step=0, slots=pack(rows.sample_slots), sequence_ids=pack(batch.sequence_ids[rows.sample_slots], "<i8"),
            tokens=pack(tokens), flags=pack(flags, "u1"), num_rows=rows.num_rows,
        )  # fmt: skip

    def collect(self, timeout=None):
        if self.late:
            self.late -= 1
            return None
        return self.results.pop(0)


class Text:
    """Shows every token as a letter; the text `stop` ends it."""

    def __init__(self, params):
        if params.stop == ("refuse",):
            raise ValueError("stop=refuse is not allowed; leave it out")
        self.stop = params.stop

    def add(self, token_ids, finish_reason):
        text = "".join(chr(97 + token_id % 26) for token_id in token_ids)
        return Shown(text, text if text in self.stop else None, len(token_ids))


def make_engine(group=None):
    group = group or FakeGroup()
    return Engine(Scheduler(LIMITS), group, make_text=Text, token_text=None, seeds=seed_sequence(0))


def submit(request_id, prompt, **params):
    return Submit(
        request_id=request_id, prompt_token_ids=pack(np.array(prompt)), params=SamplingParams(temperature=0, **params)
    )


def run(engine, most_steps=1000):
    """Return all deltas by request, joined: token ids, text, last reason."""
    told = {}
    for _ in range(most_steps):
        if not engine.has_work:
            return told
        for delta in engine.step(timeout=1.0):
            tokens, text, reason = told.get(delta.request_id, ((), "", None))
            assert reason is None, "a delta after the last one"
            told[delta.request_id] = (tokens + delta.token_ids, text + delta.text, delta.finish_reason)
    raise AssertionError("the engine did not come to an end")


def test_requests_of_all_lengths_get_all_their_tokens():
    engine = make_engine()
    for i in range(12):
        assert engine.add(submit(f"r{i}", range(10 + i, 10 + 3 * i + 1), max_tokens=1 + i)) is None
    told = run(engine)
    for i in range(12):
        last = 10 + 3 * i
        assert told[f"r{i}"][0] == tuple(range(last + 1, last + 2 + i))
        assert told[f"r{i}"][2] == "length"
    engine.scheduler.check_invariants()
    assert engine.num_steps == len(engine.workers.plans)
    assert engine.step_tokens.total == sum(2 * i + 1 + i for i in range(12)), "the last token is never a row"
    assert sum(engine.step_tokens.counts) == sum(any(plan.num_rows for plan in p.ranks) for p in engine.workers.plans)


def test_steps_are_counted_by_the_rows_of_all_ranks():
    parts = [RankResult(step=3, num_rows=rows) for rows in (4, 3, 0, 0)]
    result = result_of_ranks(3, parts, 2)
    assert result.num_rows == 7 and result.ranks == (parts[0], parts[2])
    engine = make_engine()
    engine.add(submit("a", range(13), max_tokens=1))
    engine.add(submit("b", range(3), max_tokens=2))
    run(engine)
    assert engine.step_tokens.total == 13 + 3 + 1
    assert {2**i: n for i, n in enumerate(engine.step_tokens.counts) if n} == {16: 1, 1: 1}


def test_what_a_door_must_have_done_is_refused():
    engine = make_engine()
    for params in ({"n": 2}, {"bad_words": ("a",)}):
        refused = engine.add(submit("a", [1], **params))
        assert refused.error_code == "invalid_request" and "checked_params" in refused.error
    assert not engine.has_work


def test_tokens_behind_a_stop_string_are_not_told():
    class Cuts:
        def add(self, token_ids, finish_reason):
            return Shown("x", "y", 2)

    engine = Engine(
        Scheduler(LIMITS), FakeGroup(), make_text=lambda params: Cuts(), token_text=None, seeds=seed_sequence(0)
    )
    engine.add(submit("a", [1], max_tokens=20, logprobs=0))
    request = engine.scheduler._requests["a"]
    logprobs = tuple(TokenLogprobs(sequence_id=0, token_ids=(i,), logprobs=(-1.0,), rank=1) for i in (5, 6, 7))
    (delta,) = engine._deltas([SequenceUpdate(request, [5, 6, 7], logprobs)])
    assert (delta.token_ids, delta.text, delta.finish_reason, delta.stop_reason) == ((5, 6), "x", "stop", "y")
    assert [entries[0].token_id for entries in delta.logprobs] == [5, 6]
    assert not engine.has_work


def test_two_steps_are_in_flight():
    engine = make_engine()
    engine.add(submit("a", [1], max_tokens=20))
    run(engine)
    assert engine.workers.most_in_flight == 2


def test_a_result_that_is_late_is_waited_for_without_planning_more():
    engine = make_engine()
    engine.add(submit("a", [1], max_tokens=5))
    engine.workers.late = 7
    assert run(engine)["a"][0] == (2, 3, 4, 5, 6)
    assert engine.workers.most_in_flight == 2


def test_end_token_ends_and_is_reported():
    engine = make_engine()
    engine.add(submit("a", [497], max_tokens=50))
    engine.add(submit("b", [497], max_tokens=5, ignore_eos=True))
    told = run(engine)
    assert told["a"][0] == (498, 499, 500)
    assert told["a"][2] == "stop"
    assert told["b"] == ((498, 499, 500, 501, 502), "efghi", "length")


def test_stop_string_ends_the_request_and_frees_what_it_holds():
    engine = make_engine()
    engine.add(submit("a", [0], max_tokens=50, stop=("e",)))
    engine.add(submit("b", [0], max_tokens=6, stop=("g",)))
    told = run(engine)
    assert told["a"] == ((1, 2, 3, 4), "bcde", "stop")
    assert told["b"][2] == "stop"  # by its text, though its length ended too
    assert not any(engine.scheduler.used_blocks_per_rank)


def test_refused_request_is_answered_and_disturbs_nobody():
    engine = make_engine()
    engine.add(submit("fine", [1], max_tokens=3))
    long = engine.add(submit("long", range(200), max_tokens=3))
    text = engine.add(submit("text", [1], max_tokens=3, stop=("refuse",)))
    again = engine.add(submit("fine", [1], max_tokens=3))
    for delta, word in ((long, "max_model_len"), (text, "stop=refuse"), (again, "already in use")):
        assert delta.finish_reason == "error"
        assert word in delta.error
        assert "\n" not in delta.error
    assert run(engine) == {"fine": ((2, 3, 4), "cde", "length")}


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_abort_at_any_time_frees_and_tells_once(steps):
    engine = make_engine()
    for name in "abc":
        engine.add(submit(name, range(9), max_tokens=20))
    told = [delta for _ in range(steps) for delta in engine.step()]
    gone = engine.abort(("b", "never", "b"))
    assert [(delta.request_id, delta.finish_reason) for delta in gone] == [("b", "abort")]
    rest = run(engine)
    assert set(rest) == {"a", "c"}
    assert all(delta.finish_reason is None for delta in told)
    assert not any(engine.scheduler.used_blocks_per_rank)
    engine.add(submit("b", [1], max_tokens=2))
    assert run(engine) == {"b": ((2, 3), "cd", "length")}


def test_request_whose_numbers_break_ends_alone():
    engine = make_engine()
    engine.workers.ill = {105}
    engine.add(submit("ill", [100], max_tokens=20))
    engine.add(submit("well", [200], max_tokens=20))
    told = run(engine)
    assert told["ill"] == ((101, 102, 103, 104, 105), "xyzab", "error")
    assert told["well"][0] == tuple(range(201, 221))


def test_requests_without_a_seed_get_different_ones_that_repeat_in_another_run():
    first, second, other = (seed_sequence(3, replica) for replica in (0, 0, 1))
    seeds = [first() for _ in range(100)]
    assert seeds == [second() for _ in range(100)]
    assert len({*seeds, *(other() for _ in range(100))}) == 200
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert seed_sequence(-1)() != seed_sequence(1)()


def test_logprobs_name_the_chosen_token_first_and_once():
    found = TokenLogprobs(sequence_id=1, token_ids=(7, 5, 7, 9), logprobs=(-2.0, -1.0, -2.0, -3.0), rank=2)
    entries = logprob_entries(found, str)
    assert [(e.token_id, e.logprob, e.rank, e.decoded_token) for e in entries] == [
        (7, -2.0, 2, "7"), (5, -1.0, 1, "5"), (9, -3.0, 3, "9"),
    ]  # fmt: skip
    assert logprob_entries(found, None)[0].decoded_token is None
