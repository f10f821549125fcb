"""Who comes in, where, and who has to go: refusals, the queue, placement, headroom and preemption, exactly."""

from __future__ import annotations

import random

import pytest

from moewe.runtime.plan import StepPlan, unpack
from moewe.runtime.scheduler import GroupLimits, Request, Scheduler, SchedulerConfig
from moewe.runtime.scheduling.admission import AdmissionError, QueueFullError, WaitingQueue
from tests.support.null_worker import EOS, NullEngine, make_request


def config_of(**changes: object) -> SchedulerConfig:
    fields = {"num_ranks": 1, "num_blocks": 10, "block_size": 16, "max_model_len": 512, "max_num_seqs": 4,
              "max_num_batched_tokens": 64, "eos_token_ids": (EOS,)}  # fmt: skip
    fields |= changes
    return SchedulerConfig(groups=(GroupLimits(num_blocks=fields.pop("num_blocks")),), **fields)


def admitted(plan: StepPlan) -> list[list[int]]:
    return [[new.sequence_id for new in rank.admitted] for rank in plan.ranks]


# --- refusals --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("prompt", "max_tokens", "text"),
    [
        (0, 5, "prompt has 0 tokens; send at least 1"),
        (512, 1, "prompt has 512 tokens, but max_model_len is 512, output included; "
                 "shorten the prompt to at most 511 tokens"),
        (500, 20, "prompt of 500 tokens and max_tokens=20 make 520, but max_model_len is 512; "
                  "lower max_tokens to at most 12"),
        (200, 16, "prompt of 200 tokens and max_tokens=16 need 14 KV blocks of 16 tokens, but a rank has 10 "
                  "(160 tokens, none reserved); shorten the prompt to at most 160 tokens, "
                  "or give the server more KV memory"),
        (100, 62, "prompt of 100 tokens and max_tokens=62 need 11 KV blocks of 16 tokens, but a rank has 10 "
                  "(160 tokens, none reserved); lower max_tokens to at most 61, "
                  "or give the server more KV memory"),
        (161, None, "prompt of 161 tokens and max_tokens=None need 11 KV blocks of 16 tokens, but a rank has 10 "
                    "(160 tokens, none reserved); shorten the prompt to at most 160 tokens, "
                    "or give the server more KV memory"),
    ],
    ids=["empty", "context", "context with output", "pool", "pool with output", "pool, open end"],
)  # fmt: skip
def test_what_can_never_fit_is_refused_in_one_line_and_the_next_is_served(
    prompt: int, max_tokens: int | None, text: str
):
    engine = NullEngine(config_of())
    with pytest.raises(AdmissionError) as error:
        engine.scheduler.add(make_request("big", prompt, max_tokens))
    assert str(error.value) == text
    assert not engine.scheduler.has_work
    small = make_request("small", 5, 5)
    engine.add(small)
    engine.run()
    engine.check_tokens([small])


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "length"), [(160, 1, 161), (100, 61, 161), (7, None, 161), (160, None, 161)]
)
def test_what_just_fits_runs_to_its_end(prompt: int, max_tokens: int | None, length: int):
    engine = NullEngine(config_of())
    request = make_request("a", prompt, max_tokens)
    engine.add(request)
    engine.run()
    engine.check_tokens([request])
    assert request.num_tokens == length


def test_full_queue_and_double_id_are_refused():
    """A burst may fill the slots and the queue, whether or not a step came between."""
    scheduler = Scheduler(config_of(max_queued_requests=2, max_num_seqs=1))
    for name in "abc":
        scheduler.add(make_request(name, 5, 5))
    with pytest.raises(QueueFullError, match="0 requests run and 3 wait already, and max_queued_requests is 2; try"):
        scheduler.add(make_request("d", 5, 5))
    scheduler.schedule()
    with pytest.raises(QueueFullError, match="1 requests run and 2 wait already"):
        scheduler.add(make_request("d", 5, 5))
    with pytest.raises(AdmissionError, match="request_id 'a' is already in use"):
        scheduler.add(make_request("a", 5, 5))
    scheduler.check_invariants()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_blocks": 0}, "num_blocks=0"),
        ({"max_model_len": 1}, "max_model_len=1"),
        ({"policy": "lifo"}, "policy='lifo' is not known; use one of fcfs, priority"),
        ({"max_num_batched_tokens": 3}, "max_num_batched_tokens=3 is below max_num_seqs=4"),
        ({"max_chunk_tokens": 0}, "max_chunk_tokens=0"),
    ],
    ids=["blocks", "length", "policy", "rows", "chunk"],
)
def test_limits_that_cannot_work_are_refused(changes: dict[str, object], text: str):
    with pytest.raises(ValueError, match=text):
        config_of(**changes)


# --- the queue -------------------------------------------------------------------------------------------------------
def test_queue_orders_by_policy_then_arrival_then_id():
    requests = [make_request(name, 1, priority=p, arrival=t) for name, p, t in
                [("c", 0, 2.0), ("b", 1, 1.0), ("a", 1, 1.0), ("d", 0, 3.0)]]  # fmt: skip
    for policy, order in [("fcfs", "abcd"), ("priority", "cdab")]:
        queue = WaitingQueue(policy)
        for request in requests:
            queue.push(request)
            queue.check_invariants()
        assert "".join(request.request_id for request in queue.first(9)) == order
        queue.drop(1)
        queue.check_invariants()
        queue.remove(queue.first(2)[1])
        queue.check_invariants()
        assert "".join(request.request_id for request in queue.first(2)) == order[1] + order[3]


def test_priority_is_admitted_first_and_preempted_last():
    config = config_of(policy="priority", num_blocks=4, block_size=4, max_num_seqs=2, max_model_len=17)
    engine = NullEngine(config)
    urgent, bulk = make_request("urgent", 4, 12, priority=0, arrival=5.0), make_request("bulk", 4, 12, priority=9)
    engine.add(bulk, urgent)
    engine.step()
    assert (urgent.sequence_id, bulk.sequence_id) == (0, 1)
    engine.run()
    assert (urgent.num_preemptions, bulk.num_preemptions) == (0, 1)
    engine.check_tokens([urgent, bulk])


def test_a_request_that_has_no_room_is_not_overtaken():
    engine = NullEngine(config_of(num_blocks=10, block_size=4, max_model_len=41))
    running, large = make_request("running", 20, 9), make_request("large", 30, 9, arrival=1.0)
    small = make_request("small", 2, 2, arrival=2.0)
    engine.add(running, large, small)
    engine.step()
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (1, 2)
    engine.run()
    assert large.sequence_id < small.sequence_id
    engine.check_tokens([running, large, small])


# --- placement -------------------------------------------------------------------------------------------------------
def test_placement_takes_the_least_token_work_and_ties_go_to_the_lowest_rank():
    engine = NullEngine(config_of(num_ranks=3, num_blocks=100))
    sizes = [("a", 10), ("b", 10), ("c", 200), ("d", 10), ("e", 30), ("f", 10)]
    requests = [make_request(name, n, 10, arrival=float(i)) for i, (name, n) in enumerate(sizes)]
    engine.add(*requests)
    engine.step()
    assert admitted(engine.plans[0]) == [[0, 3, 5], [1, 4], [2]]
    assert engine.scheduler.running_per_rank == (3, 2, 1)


def test_placement_skips_ranks_without_slot_or_blocks():
    engine = NullEngine(config_of(num_ranks=2, max_num_seqs=1))
    engine.add(*(make_request(name, 5, 5, arrival=float(i)) for i, name in enumerate("abc")))
    engine.step()
    assert admitted(engine.plans[0]) == [[0], [1]]
    assert engine.scheduler.num_waiting == 1
    engine.run()
    assert admitted(engine.plans[-5]) == [[2], []]


def test_admission_keeps_a_spare_block_for_each_sequence_unless_all_can_run_to_their_end():
    def running(max_tokens: int) -> int:
        engine = NullEngine(config_of(num_blocks=12, max_num_seqs=8))
        engine.add(*(make_request(f"r{i}", 20, max_tokens, arrival=float(i)) for i in range(6)))
        engine.step()
        return engine.scheduler.num_running

    assert running(12) == 6, "each ends with 31 tokens in KV, 2 blocks: all fit for good"
    assert running(13) == 6, "32 tokens in KV are still 2 blocks"
    assert running(14) == 4, "they may grow to 3: after 4 prompts 4 spare blocks are left, after 5 only 2"


# --- preemption ------------------------------------------------------------------------------------------------------
def test_the_youngest_is_preempted_and_comes_back_with_all_its_tokens_once_they_are_known():
    # 8 blocks of 4: at 8 tokens each the three hold 6 blocks, and the ninth token of each would need 3 more.
    engine = NullEngine(config_of(num_blocks=8, block_size=4, max_model_len=33))
    old, mid, young = (make_request(name, 4, 12, arrival=float(i)) for i, name in enumerate(["old", "mid", "young"]))
    engine.add(old, mid, young)
    engine.step()
    assert engine.scheduler.running_per_rank == (3,)
    while engine.scheduler.num_preemptions == 0:
        engine.step()
    plan = engine.plans[-1].ranks[0]
    assert plan.num_decodes == 2
    assert unpack(plan.released).tolist() == [2]
    assert unpack(plan.grants).reshape(-1, 4).tolist() == [[0, 0, 2, 2], [0, 1, 2, 5]], "the two blocks just freed"
    assert (young.num_tokens, young.state.value) == (9, "returning"), "the ninth came after it had lost its slot"
    assert engine.scheduler.num_waiting == 1
    while young.sequence_id == 2:
        engine.step()
    (back,) = engine.plans[-1].ranks[0].admitted
    assert (back.sequence_id, back.max_length) == (3, 16)
    assert unpack(back.tokens).tolist() == young.token_ids().tolist()
    assert len(young.token_ids()) == 9
    engine.run()
    engine.check_tokens([old, mid, young])
    assert (old.num_preemptions, mid.num_preemptions, young.num_preemptions) == (0, 0, 1)
    assert young.first_scheduled == 1.0, "when it first ran, not when it came back"


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_preempted_request_is_neither_overtaken_nor_brought_back_without_its_tokens(depth: int):
    # Blocks of one token: at 8 tokens each of 17 blocks one is free, and both need one. The old one ends a step later.
    engine = NullEngine(config_of(num_blocks=17, block_size=1, max_model_len=17), depth=depth)
    old, young = make_request("old", 4, 6), make_request("young", 4, 12, arrival=1.0)
    late = make_request("late", 2, 2, arrival=2.0)
    engine.add(old, young)
    while engine.scheduler.used_blocks_per_rank < (14,):
        engine.step()
    engine.add(late)
    while engine.scheduler.num_preemptions == 0:
        engine.step()
    assert not engine.plans[-1].ranks[0].admitted, "the blocks are not for the one behind it"
    engine.run()
    assert (young.sequence_id, late.sequence_id) == (2, 3)
    (back,) = [new for plan in engine.plans for new in plan.ranks[0].admitted if new.sequence_id == 2]
    assert len(unpack(back.tokens)) == 9, "with every token it was given a step for"
    engine.check_tokens([old, young, late])


@pytest.mark.parametrize("depth", [1, 2])
def test_four_requests_in_a_pool_for_two_and_a_half(depth: int):
    engine = NullEngine(config_of(num_blocks=20, max_num_batched_tokens=16), depth=depth)
    requests = [make_request(f"r{i}", 60, 60, arrival=float(i)) for i in range(4)]
    engine.add(*requests)
    engine.run()
    engine.check_tokens(requests)
    assert engine.scheduler.num_preemptions > 0
    assert requests[0].num_preemptions == 0, "the oldest always runs to its end"


def test_preempted_request_that_ends_with_the_token_in_flight_is_not_run_again():
    # Find a run in which the in-flight token of the preempted one is an end token.
    for seed in range(1, 2000):
        engine = NullEngine(config_of(num_blocks=8, block_size=4, max_model_len=33))
        young = make_request("young", 4, 17, seed=seed, arrival=9.0, ignore_eos=False)
        engine.add(make_request("old", 4, 17), make_request("mid", 4, 17, arrival=1.0), young)
        engine.run()
        engine.check_tokens([young])
        if young.num_preemptions and young.sequence_id == 2:
            assert engine.reasons["young"] == "stop"
            return
    raise AssertionError("no such run in 2000 seeds")


def test_books_balance_after_random_requests_with_aborts():
    engine = NullEngine(config_of(num_ranks=2, num_blocks=40, max_model_len=330))
    rng = random.Random(8)
    requests = [make_request(f"r{i}", rng.randint(1, 300), rng.randint(1, 30), ignore_eos=False) for i in range(200)]
    victims = {request.request_id for request in requests if rng.random() < 0.3}
    for request in requests:
        engine.add(request)
        engine.step()
        if request.request_id in victims and rng.random() < 0.5:
            engine.scheduler.abort(request.request_id)
    for name in sorted(victims):
        engine.scheduler.abort(name)
        engine.step()
    engine.run()
    engine.check_tokens(requests, except_for=victims)


def test_client_gone_frees_everything_at_once():
    engine = NullEngine(config_of(max_num_seqs=1))
    running, queued = make_request("running", 100, 60), make_request("queued", 100, 60, arrival=1.0)
    engine.add(running, queued)
    for _ in range(5):
        engine.step()
    assert engine.scheduler.used_blocks_per_rank == (7,)
    assert engine.scheduler.abort("queued") and engine.scheduler.abort("running")
    engine.scheduler.check_invariants()
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (0, 0)
    assert engine.scheduler.used_blocks_per_rank == (0,)
    engine.run()


def test_request_counts_its_tokens():
    request: Request = make_request("a", 3, 5)
    request.append([7, 8])
    assert request.num_tokens == 5
    assert request.token_ids().tolist() == [*request.prompt_token_ids.tolist(), 7, 8]
