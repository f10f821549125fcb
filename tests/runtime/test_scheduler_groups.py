"""Several cache groups: what is freed behind a window and when, refusals by group, and rooms that differ."""

from __future__ import annotations

import pytest

from moewe.runtime.plan import RankPlan, unpack
from moewe.runtime.scheduler import AdmissionError, GroupLimits, SchedulerConfig
from tests.support.null_worker import NullEngine, make_request


def config_of(*groups: tuple[int, str, int], **changes: object) -> SchedulerConfig:
    fields = {"num_ranks": 1, "block_size": 4, "max_model_len": 400, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    limits = tuple(GroupLimits(num_blocks=n, kind=kind, window=window) for n, kind, window in groups)
    return SchedulerConfig(groups=limits, **(fields | changes))


def used(engine: NullEngine) -> list[int]:
    return [int(pool.num_used[0]) for pool in engine.scheduler._batch.pools]


def grants_of(plan: RankPlan, group: int) -> list[list[int]]:
    return [row[1:] for row in unpack(plan.grants).reshape(-1, 4).tolist() if row[0] == group]


def test_blocks_behind_a_window_are_freed_when_the_next_row_is_planned_and_serve_it_at_once():
    engine = NullEngine(config_of((20, "full", 0), (9, "window", 8)), depth=1)
    request = make_request("a", 16, 60)
    engine.add(request)
    engine.step()
    assert used(engine) == [4, 4], "a chunk is written whole"
    engine.step()  # row 16 sees tokens 9 to 16: blocks 0 and 1 are behind it
    assert used(engine) == [5, 3]
    assert grants_of(engine.plans[-1].ranks[0], 0) == [[0, 4, 4]]
    assert grants_of(engine.plans[-1].ranks[0], 1) == [[0, 4, 0]], "a block that this very plan has freed"
    seen = []
    while engine.scheduler.has_work:
        engine.step()
        seen.append(used(engine)[1])
    assert max(seen) == 3 and seen[-1] == 0
    engine.check_tokens([request])


def test_runs_give_their_blocks_back_all_together():
    engine = NullEngine(config_of((20, "chunk", 8)), depth=1)
    engine.add(make_request("a", 7, 20))
    held = []
    while engine.scheduler.has_work:
        engine.step()
        held.append(used(engine)[0])
    # Tokens in KV after each step: 7, 8, 9 ..; the first of a run (8, 16, 24) frees the two blocks of the run before.
    assert held[:10] == [2, 2, 1, 1, 1, 1, 2, 2, 2, 2]
    assert held[10:] == [1, 1, 1, 1, 2, 2, 2, 2, 1, 0]


def test_a_long_prompt_needs_a_window_and_a_chunk_only():
    engine = NullEngine(config_of((7, "window", 8)))
    long, short = make_request("long", 300, 20), make_request("short", 5, 20, arrival=1.0)
    engine.add(long, short)
    engine.run()
    engine.check_tokens([long, short])
    assert engine.scheduler.num_preemptions == 0
    assert engine.num_steps < 300 // 12 + 30, "chunks of a few blocks, not of single tokens"


@pytest.mark.parametrize("groups", [((4, "window", 8),), ((100, "full", 0), (3, "window", 8))])
def test_a_window_that_just_fits_runs_any_length(groups: tuple[tuple[int, str, int], ...]):
    engine = NullEngine(config_of(*groups))
    requests = [make_request(f"r{i}", 90 + i, 100, arrival=float(i)) for i in range(5)]
    engine.add(*requests)
    engine.run()
    engine.check_tokens(requests)


def test_chunks_are_cut_to_the_scarcest_group():
    engine = NullEngine(config_of((100, "full", 0), (5, "window", 8)), depth=1)
    engine.add(make_request("a", 60, 2))
    engine.step()
    (first,) = engine.plans[0].ranks[0].chunks
    assert first.num_tokens == 16
    engine.step()  # 2 of 4 blocks were freed: 3 are there
    (second,) = engine.plans[1].ranks[0].chunks
    assert (second.start, second.num_tokens) == (16, 12)
    engine.run()


def test_preemption_looks_at_every_group():
    # Four sequences fit the full group for good, but only two windows of three blocks fit the other.
    engine = NullEngine(config_of((40, "full", 0), (6, "window", 8), max_model_len=40))
    requests = [make_request(f"r{i}", 3, 30, arrival=float(i)) for i in range(4)]
    engine.add(*requests)
    engine.run()
    engine.check_tokens(requests)
    assert engine.scheduler.num_preemptions > 0
    assert requests[0].num_preemptions == 0


@pytest.mark.parametrize(
    ("groups", "prompt", "max_tokens", "text"),
    [
        (((10, "full", 0), (9, "window", 8)), 41, 9, "prompt of 41 tokens and max_tokens=9 need 13 KV blocks of 4 "
         "tokens, but a rank has 10 (40 tokens, none reserved); shorten the prompt to at most 40 tokens, or give the "
         "server more KV memory"),
        (((50, "full", 0), (2, "window", 8)), 6, 9, "prompt of 6 tokens and max_tokens=9 need 3 KV blocks of 4 tokens "
         "for each window of 8 tokens, but a rank has 2 (8 tokens, none reserved); lower max_tokens to at most 3, or "
         "give the server more KV memory"),
        (((1, "chunk", 8),), 5, None, "prompt of 5 tokens and max_tokens=None need 2 KV blocks of 4 tokens for each "
         "chunk of 8 tokens, but a rank has 1 (4 tokens, none reserved); shorten the prompt to at most 4 tokens, or "
         "give the server more KV memory"),
    ],
    ids=["full", "window", "chunk"],
)  # fmt: skip
def test_what_no_group_can_ever_hold_is_refused_with_its_numbers(
    groups: tuple[tuple[int, str, int], ...], prompt: int, max_tokens: int | None, text: str
):
    engine = NullEngine(config_of(*groups))
    with pytest.raises(AdmissionError) as error:
        engine.scheduler.add(make_request("a", prompt, max_tokens))
    assert str(error.value) == text


def test_usage_is_that_of_the_fullest_group():
    engine = NullEngine(config_of((20, "full", 0), (5, "window", 8), num_ranks=2), depth=1)
    engine.add(make_request("a", 16, 9))
    engine.step()
    assert engine.scheduler.fullest_groups == ((4, 5), (0, 20))
    assert engine.scheduler.used_blocks_per_rank == (4, 0)
    for _ in range(5):
        engine.step()
    assert used(engine) == [6, 3]
    assert engine.scheduler.fullest_groups[0] == (3, 5)
    engine.run()


@pytest.mark.parametrize(
    ("group", "text"),
    [({"num_blocks": 0}, "num_blocks=0"), ({"num_blocks": 1, "kind": "window"}, "'window' cannot have window=0"),
     ({"num_blocks": 1, "window": 4}, "'full' cannot have window=4")],
)  # fmt: skip
def test_groups_that_cannot_be_are_refused(group: dict[str, object], text: str):
    with pytest.raises(ValueError, match=text):
        GroupLimits(**group)


def test_a_model_without_cache_groups_is_refused():
    with pytest.raises(ValueError, match=r"groups=\(\)"):
        config_of()
