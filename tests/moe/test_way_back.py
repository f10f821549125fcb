"""What moves may lose is bounded whatever load comes: the way back, what it costs at most, and an adversary."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moewe.moe.wide_ep.balancing import PhaseLoad, Planner, PolicyOptions
from moewe.moe.wide_ep.balancing.ledger import SPEND, window_seconds
from moewe.moe.wide_ep.balancing.way_back import steps_back
from moewe.moe.wide_ep.placement import ExpertPlacement, first_placement
from moewe.topologies.cost import Ceilings, Link
from moewe.topologies.layer_cost import ExpertSize, LayerCost, TokenRows

E, K, TOKENS = 16, 4, 4096
DOMAINS = {"one domain": (0, 0, 0, 0), "two domains": (0, 0, 1, 1)}


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 8))
def test_every_expert_stands_somewhere_all_the_way_back(seed: int, most: int) -> None:
    rng = np.random.default_rng(seed)
    start = np.concatenate([np.arange(8), rng.integers(0, 8, 4)])
    slots = np.concatenate([np.arange(8), rng.integers(0, 8, 4)])
    rng.shuffle(start)
    rng.shuffle(slots)
    way = [slots, *steps_back(slots, start, most)]
    assert (way[-1] == start).all()
    for before, after in pairwise(way):
        assert 1 <= (before != after).sum() <= max(most, 2)
        assert len(set(after.tolist())) == 8
        rest = [one.tolist() for one in steps_back(after, start, most)]
        assert rest == [one.tolist() for one in way[len(way) - len(rest) :]], "from halfway on it is the same way"


def model_of(placement: ExpertPlacement, between: float, *, together: bool, byte_s: float = 0.0) -> LayerCost:
    """A row takes 1 us of arithmetic and 10 bytes; an expert's weights take `byte_s` to read."""
    ceilings = Ceilings(
        memory_bandwidth=1.0 / max(byte_s, 1e-30), flops=1e6,
        within=Link(bandwidth=1e8, latency=0.0), between=Link(bandwidth=between, latency=0.0),
    )  # fmt: skip
    size = ExpertSize(expert_bytes=1, row_bytes=10, flops=1.0)
    token = TokenRows(top_k=K, together=together)
    return LayerCost(size, ceilings, placement.slot_ranges, placement.rank_domain.tolist(), token=token)


def any_load(rng: np.random.Generator, number: int = 1) -> np.ndarray:
    """Rows of TOKENS tokens at K different experts each: even, steep, or a few experts alone, in any order [n, E]."""
    popularity = rng.permuted(np.tile(np.arange(1.0, E + 1) ** -rng.choice([0.0, 1.2, 3.0, 30.0]), (number, 1)), axis=1)
    load = np.zeros((number, E))
    for _ in range(K * 4):  # in shares of a quarter of the tokens, no expert more often than there are tokens
        room = load < TOKENS
        chosen = np.argmax(np.where(room, popularity / (1 + load / TOKENS * 4), -1.0), axis=1)
        load[np.arange(number), chosen] += TOKENS / 4
    return load


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(list(DOMAINS)), st.booleans(), st.sampled_from([1, 64]))
def test_no_load_loses_more_than_the_bound(seed: int, domains: str, together: bool, steps: int) -> None:
    rng = np.random.default_rng(seed)
    start = first_placement(1, E, num_redundant=4, domains=DOMAINS[domains])
    model = model_of(start, float(rng.choice([1e8, 1e6])), together=together, byte_s=float(rng.choice([0.0, 1e-4])))
    slots = start.physical_to_logical.copy()
    for _ in range(int(rng.integers(1, 4))):
        a, b = rng.integers(0, slots.shape[1], 2)
        held = [set(slots[0, range(*start.slot_ranges[start.slot_rank[slot]])].tolist()) for slot in (a, b)]
        if slots[0, a] not in held[1] and slots[0, b] not in held[0]:
            slots[0, [a, b]] = slots[0, [b, a]]
    after = start.with_layers(slots, any_load(rng), [0])
    bound = model.most_lost(start.slot_of[0], after.slot_of[0], rows=K * TOKENS, steps=steps)
    for load in any_load(rng, 40):
        window = (PhaseLoad(load=load[None], steps=steps),)
        lost = window_seconds(after, window, model) - window_seconds(start, window, model)
        assert lost <= bound * (1 + 1e-9) + 1e-12, (lost, bound)


@pytest.mark.parametrize(
    ("between", "together"),
    [(1e8, False), pytest.param(1e6, True, marks=pytest.mark.slow)],
    ids=["fast link, rows", "slow link, copies"],
)
def test_an_adversary_who_sees_where_experts_stand_takes_no_more_than_is_allowed(
    between: float, together: bool
) -> None:
    """It baits with load that stays until something has moved, and then sends the worst that it finds, and again."""
    rng = np.random.default_rng(5)
    start = first_placement(1, E, num_redundant=4, domains=DOMAINS["two domains"])
    planner = Planner(start=start, model=model_of(start, between, together=together))
    options = PolicyOptions(transfer_s=1e-5, horizon_steps=1000, max_moves=3)
    bait, lost_s, back = any_load(rng), 0.0, 0
    for _ in range(150):
        load = bait
        if planner.placement is not start:
            loads = [bait, *(any_load(rng) for _ in range(4))]
            lost = [
                window_seconds(planner.placement, one, planner.model) - window_seconds(start, one, planner.model)
                for one in ((PhaseLoad(load=load, steps=1),) for load in loads)
            ]
            load = loads[int(np.argmax(lost))]
            lost_s += max(max(lost), 0.0)
        planner.add((PhaseLoad(load=load, steps=1),))
        if (decision := planner.decide(options)) is not None:
            planner.carry_out(decision, decision.transfer_s)
            back += decision.takes_back
        ledger = planner.ledger
        assert ledger.now_s + ledger.spent_s <= (1 + SPEND) * ledger.off_s
    assert back > 1 and lost_s > 0.002 * ledger.off_s, "it did harm, and moves were taken back"
