"""Reports on prompts, and requests that generate nothing: each place once, through chunks, preemption and aborts."""

from __future__ import annotations

import random

import numpy as np
import pytest

from moewe.runtime.plan import FINISH_STOP, RankResult, StepResult, pack, unpack
from moewe.runtime.scheduler import AdmissionError, GroupLimits, Request, Scheduler, SchedulerConfig
from moewe.runtime.scheduling.step import MOST_JUDGED_TOKENS
from tests.support.null_worker import EOS, NullEngine, make_request


def config_of(**changes: object) -> SchedulerConfig:
    fields = {"num_ranks": 1, "block_size": 4, "max_model_len": 48, "max_num_seqs": 4, "max_num_batched_tokens": 8}
    blocks = changes.pop("num_blocks", 100)
    return SchedulerConfig(groups=(GroupLimits(num_blocks=blocks),), eos_token_ids=(EOS,), **{**fields, **changes})


def places(engine: NullEngine, request: Request) -> list[int]:
    found = [(piece.start, unpack(piece.token_ids).tolist()) for piece in engine.prompt_logprobs[request.request_id]]
    told = [start + i for start, ids in found for i in range(len(ids))]
    assert [token for _, ids in found for token in ids] == request.prompt_token_ids[told].tolist()
    return told


def test_chunks_report_as_they_run_and_the_last_one_with_the_first_token() -> None:
    engine = NullEngine(config_of())
    request = make_request("a", 20, 2, prompt_logprobs=0)
    engine.add(request)
    updates = [update for _ in range(5) for update in engine.step()]
    assert [piece.start for update in updates for piece in update.prompt_logprobs] == [1, 9, 17]
    assert [len(update.token_ids) for update in updates[:3]] == [0, 0, 1]
    assert request.num_prompt_logprobs == 19


def test_a_request_may_generate_nothing() -> None:
    engine = NullEngine(config_of())
    requests = [make_request("a", 20, 0, prompt_logprobs=1), make_request("b", 1, 0), make_request("c", 5, 3)]
    engine.add(*requests)
    engine.run()
    engine.check_tokens(requests)
    assert places(engine, requests[0]) == list(range(1, 20))


def test_a_prompt_that_fills_the_pool_fits_only_where_nothing_must_follow_it_in_kv() -> None:
    config = config_of(num_blocks=5)
    for prompt, max_tokens, fits in ((20, 0, True), (20, 1, True), (20, 2, False), (21, 0, False), (21, None, False)):
        engine = NullEngine(config)
        request = make_request("a", prompt, max_tokens)
        if fits:
            engine.add(request)
            engine.run()
            engine.check_tokens([request])
        else:
            with pytest.raises(AdmissionError):
                engine.add(request)


def test_several_tokens_of_a_sequence_in_a_step_are_one_update() -> None:
    scheduler = Scheduler(config_of())
    request = make_request("a", 3, 20)
    scheduler.add(request)
    scheduler.schedule()
    rank = RankResult(
        step=0, slots=pack(np.array([0])), sequence_ids=pack(np.array([0]), "<i8"), tokens=pack(np.array([5, 6, 7])),
        counts=pack(np.array([3])), flags=pack(np.array([FINISH_STOP]), "u1"),
    )  # fmt: skip
    (update,) = scheduler.apply(StepResult(step=0, ranks=(rank,)))
    assert (update.token_ids, update.finish_reason, request.generated) == ([5, 6, 7], "stop", [5, 6, 7])
    assert not scheduler.has_work


@pytest.mark.parametrize("seed", range(10))
def test_random_prompts_are_told_once_through_preemptions_and_aborts(seed: int) -> None:
    chance = random.Random(seed)
    engine = NullEngine(config_of(num_ranks=2, num_blocks=12, max_chunk_tokens=chance.choice([None, 3])))
    requests = [
        make_request(f"r{i}", chance.randint(1, 24), max_tokens, prompt_logprobs=chance.choice([None, 1]))
        for i, max_tokens in enumerate(chance.choices([0, 20, 24], k=20))
    ]
    engine.add(*requests)
    aborted: set[str] = set()
    for _ in range(3000):
        if not engine.scheduler.has_work:
            break
        engine.step()
        if chance.random() < 0.05:
            name = chance.choice(requests).request_id
            if engine.scheduler.abort(name):
                aborted.add(name)
    engine.run(1)
    engine.check_tokens(requests, except_for=aborted)
    assert engine.scheduler.num_preemptions
    for request in requests:
        if request.request_id not in aborted:
            wanted = 0 if request.params.prompt_logprobs is None else len(request.prompt_token_ids)
            assert places(engine, request) == list(range(1, wanted))


def test_prompts_that_are_judged_share_what_a_step_judges_and_others_do_not() -> None:
    engine = NullEngine(config_of(num_blocks=2000, max_model_len=3000, max_num_batched_tokens=4000), depth=1)
    judged = [make_request(f"a{i}", 900, 1, prompt_logprobs=0) for i in range(2)]
    plain = make_request("b", 1500, 1)
    engine.add(*judged, plain)
    sizes = []
    while engine.scheduler.has_work:
        engine.step()
        sizes.append([(chunk.slot, chunk.num_tokens) for chunk in engine.plans[-1].ranks[0].chunks])
    assert sizes == [[(0, 900), (1, 124), (2, 1500)], [(1, 776)]]
    assert MOST_JUDGED_TOKENS == 1024
    engine.check_tokens([*judged, plain])
    assert all(places(engine, request) == list(range(1, 900)) for request in judged)
