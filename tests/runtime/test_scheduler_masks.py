"""Constrained requests: one mask a token, whoever waits for one sits out, and the others go on at depth two."""

from __future__ import annotations

import random

import numpy as np
import pytest

from moewe.runtime.params import SamplingParams, StructuredSpec
from moewe.runtime.plan import Chunk, RankPlan, unpack
from moewe.runtime.scheduler import GroupLimits, Request, SchedulerConfig
from tests.support.null_worker import EOS, NullEngine, make_request

ALL = b"\xff\xff\xff\xff"


def config_of(**changes: object) -> SchedulerConfig:
    fields = {"num_ranks": 1, "block_size": 4, "max_model_len": 400, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    blocks = changes.pop("num_blocks", 100)
    groups = (GroupLimits(num_blocks=blocks), *changes.pop("more_groups", ()))
    return SchedulerConfig(groups=groups, eos_token_ids=(EOS,), **{**fields, **changes})


def constrained(name: str, prompt: int, max_tokens: int) -> Request:
    return make_request(name, prompt, max_tokens, structured=StructuredSpec(kind="json_object"))


def mask_of(number: int) -> bytes:
    return (number + 1).to_bytes(4, "little")


def masks_in(engine: NullEngine, rank: int = 0) -> list[tuple[int, bytes]]:
    return [(mask.slot, mask.words) for mask in engine.plans[-1].ranks[rank].masks]


def test_a_prompt_waits_before_its_last_token_and_each_token_needs_a_mask():
    engine = NullEngine(config_of(), depth=1)
    request = constrained("a", 10, 3)
    engine.add(request)
    engine.step()
    assert engine.plans[-1].ranks[0].chunks == (Chunk(slot=0, start=0, num_tokens=9, samples=False),)
    assert engine.scheduler.schedule() is None
    assert engine.scheduler.release("a", mask_of(0))
    engine.step()
    assert engine.plans[-1].ranks[0].chunks == (Chunk(slot=0, start=9, num_tokens=1, samples=True),)
    assert masks_in(engine) == [(0, mask_of(0))]
    for number in (1, 2):
        assert engine.scheduler.schedule() is None
        assert engine.scheduler.release("a", mask_of(number))
        engine.step()
        assert engine.plans[-1].ranks[0].num_decodes == 1
        assert masks_in(engine) == [(0, mask_of(number))]
    assert engine.reasons == {"a": "length"}
    engine.check_tokens([request])


def test_others_run_at_depth_two_while_a_sequence_sits_out():
    engine = NullEngine(config_of())
    free, bound = make_request("free", 3, 12), constrained("masked", 3, 4)
    engine.add(free, bound)
    engine.scheduler.release("masked", None)
    engine.step()  # both prompts
    for number in range(3):
        engine.step()
        plan = engine.plans[-1].ranks[0]
        assert (plan.num_decodes, unpack(plan.held).tolist(), plan.masks) == (1, [1], ())
        assert engine.scheduler.num_in_flight == 1  # this one; the step before was applied and has brought a token
        assert len(engine.tokens["masked"]) == number + 1
        engine.scheduler.release("masked", mask_of(number))
        engine.step()
        plan = engine.plans[-1].ranks[0]
        assert (plan.num_decodes, plan.held, masks_in(engine)) == (2, b"", [(1, mask_of(number))])
    engine.run()
    engine.check_tokens([free, bound])


def test_structured_params_constrain_and_a_plan_without_any_is_as_before():
    engine = NullEngine(config_of())
    params = SamplingParams(max_tokens=4, structured=StructuredSpec(kind="json_object"))
    bound = Request("bound", np.array([1, 2], np.int32), params)
    engine.add(bound, make_request("free", 2, 9))
    assert bound.constrained and bound.awaits_mask
    engine.step()
    engine.scheduler.abort("bound")
    engine.step()
    engine.step()
    assert engine.plans[-1].ranks == (RankPlan(num_decodes=1),)
    with pytest.raises(ValueError, match=r"kind='xml'.*json_object"):
        StructuredSpec(kind="xml")


def test_admission_is_told_even_when_no_row_runs():
    engine = NullEngine(config_of())
    bound = constrained("bound", 1, 2)
    engine.add(bound)
    engine.step()
    assert engine.plans[-1].header.kind == "idle"
    assert len(engine.plans[-1].ranks[0].admitted) == 1
    engine.scheduler.release("bound", ALL)
    while not engine.reasons:
        engine.step()
        if bound.awaits_mask:
            engine.scheduler.release("bound", ALL)
    engine.check_tokens([bound])


def test_wrong_releases():
    engine = NullEngine(config_of())
    engine.add(constrained("a", 2, 8), make_request("b", 2, 8))
    assert not engine.scheduler.release("gone", ALL)
    with pytest.raises(ValueError, match="'a' allows no token"):
        engine.scheduler.release("a", b"\0" * 4)
    engine.scheduler.release("a", ALL)
    for name in ("a", "b"):
        with pytest.raises(RuntimeError, match="does not wait"):
            engine.scheduler.release(name, ALL)


def test_a_snapshot_keeps_who_waits():
    engine = NullEngine(config_of(), depth=1)
    request = constrained("a", 6, 5)
    engine.add(request)
    engine.scheduler.release("a", ALL)
    engine.step()
    engine.submit(engine.scheduler.snapshot())
    engine.scheduler.check_invariants()
    engine.collect()
    assert engine.scheduler.schedule() is None
    for _ in range(4):
        engine.scheduler.release("a", ALL)
        engine.step()
    engine.check_tokens([request])


@pytest.mark.parametrize("seed", range(12))
def test_random_mixes_give_every_token_one_mask_through_preemptions(seed):
    chance = random.Random(seed)
    window = (GroupLimits(num_blocks=12, kind="window", window=5),) if seed % 2 else ()
    config = config_of(num_ranks=2, num_blocks=11, more_groups=window, max_model_len=45, max_num_batched_tokens=12)
    engine = NullEngine(config)
    requests = [
        (constrained if chance.random() < 0.6 else make_request)(f"r{i}", chance.randint(2, 20), chance.randint(8, 24))
        for i in range(14)
    ]
    engine.add(*requests)
    given = {request.request_id: 0 for request in requests}
    used: list[bytes] = []
    for _ in range(3000):
        if not engine.scheduler.has_work:
            break
        before = engine.num_steps
        engine.step()
        if engine.num_steps > before:
            used += [mask.words for rank in engine.plans[-1].ranks for mask in rank.masks]
        for i, request in enumerate(requests):
            # A mask is made of all tokens known: none of this request may be in flight.
            known = given[request.request_id] == len(request.generated)
            if request.awaits_mask and request.request_id not in engine.reasons and known and chance.random() < 0.5:
                engine.scheduler.release(request.request_id, mask_of(100 * i + given[request.request_id]))
                given[request.request_id] += 1
    engine.run(1)
    engine.check_tokens(requests)
    assert engine.scheduler.num_preemptions
    expected = [mask_of(100 * i + k) for i, r in enumerate(requests) if r.constrained for k in range(len(r.generated))]
    assert sorted(used) == sorted(expected)
