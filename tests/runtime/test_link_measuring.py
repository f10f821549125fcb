"""Links are measured at the start: ranks count what a probe sends, the engine asks and tells, and nothing is left."""

from __future__ import annotations

import logging

import pytest

from moewe.runtime.config import QUICK_VARIABLE
from moewe.topologies.exchange_cost import ExchangeCost, MeasuredLinks
from moewe.topologies.link_probes import ANYWHERE, EXCHANGE, EXPERTS, FAR, LAYERS, NEAR, LinkProbe, RankFound
from moewe.topologies.overlap_choice import HALVES, SHARED
from tests.runtime.test_generation import start
from tests.support.fixtures import checkpoint
from tests.support.harness import Group
from tests.support.native import needs_native
from tests.support.setups import Setup

DOMAINS = "EP4DP1[domains=2+2]"
ROW = 64 * 4  # bytes of a row of the fixture in fp32


def probed(group: Group, probe: LinkProbe) -> list[RankFound]:
    found: list[RankFound] = group._all("probe", probe)
    return found


@pytest.mark.parametrize("exchange", ["all_to_all", "hierarchical", "padded"])
def test_rows_of_a_probe_go_where_it_says(exchange: str) -> None:
    with Group(checkpoint("T-QW3"), Setup(topology=DOMAINS, exchange=exchange)) as group:
        sent = {
            what: probed(group, LinkProbe(exchange=exchange, rows=8, what=what, repeats=2))
            for what in (NEAR, FAR, ANYWHERE)
        }
        for ranks in sent.values():
            assert all(len(rank.seconds[EXCHANGE]) == 2 and min(rank.seconds[EXCHANGE]) > 0 for rank in ranks)
        for near, far in zip(sent[NEAR], sent[FAR], strict=True):
            if exchange == "padded":  # room goes to all, filled or not
                assert near.far_bytes == far.far_bytes > 8 * ROW and near.near_bytes == far.near_bytes > 0
                continue
            # Of two choices among four experts of the own domain, two on each rank, some are on the other rank.
            assert near.near_bytes > 0 and near.far_bytes <= 8 * 4, "counts cross, rows do not"
            # Each row crosses once to a domain, or once to each rank that it has experts on; as many answers come back.
            assert far.far_bytes >= 2 * 8 * ROW
        for worker in group.workers:
            assert not any(worker._exchange.take_traffic().num_bytes), "probes are no traffic of steps"
            assert not worker.counters.steps.any() and not worker.counters.expert_tokens.any()


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=needs_native)])
def test_layers_are_timed_in_turns_and_their_experts_counted(dtype: str) -> None:
    path = checkpoint("T-QW3", dtype="bfloat16") if dtype == "bfloat16" else checkpoint("T-QW3")
    with Group(path, Setup(topology=DOMAINS, exchange="all_to_all", dtype=dtype)) as group:
        probe = LinkProbe(exchange="all_to_all", rows=64, what=LAYERS, repeats=3, overlaps=(SHARED, HALVES))
        ranks = probed(group, probe)
        layer = group.workers[0].decoder.moe_layers[0]
    for rank in ranks:
        assert set(rank.seconds) == {SHARED, HALVES, EXPERTS} and {len(each) for each in rank.seconds.values()} == {3}
        assert all(experts < whole for experts, whole in zip(rank.seconds[EXPERTS], rank.seconds[SHARED], strict=True))
        assert 0 < rank.expert_bytes <= 2 * layer.bytes_per_slot, "two of eight experts stand on a rank"
    rows = sum(rank.expert_flops for rank in ranks) / layer.flops_per_row
    assert rows == 4 * 64 * group.top_k


@pytest.mark.parametrize(
    ("topology", "names"), [("EP2DP1", ("threads",)), (DOMAINS, ("hierarchical",)), ("EP1DP1", ())]
)
def test_an_engine_knows_its_links_when_it_is_ready(topology: str, names: tuple[str, ...]) -> None:
    replicas = start(topology, "threads")
    try:
        links = replicas.ready[0].links
    finally:
        replicas.close()
    if not names:
        assert links is None
        return
    assert links is not None and tuple(cost.name for cost in links.exchanges) == names
    assert all(cost.fixed_s > 0 and cost.within_s > 0 for cost in links.exchanges)


def test_all_probes_lead_to_the_speed_of_experts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(QUICK_VARIABLE)
    caplog.set_level(logging.INFO)
    replicas = start(DOMAINS, "threads")
    try:
        links = replicas.ready[0].links
    finally:
        replicas.close()
    assert links is not None and links.took_s > 0
    (cost,) = links.exchanges
    assert cost.fixed_s > 0 and cost.within_s > 0 and cost.between_s > 0 and 0 <= cost.hidden <= 1
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("links: ")]
    assert said == links.lines()


def test_a_line_says_what_an_exchange_costs() -> None:
    cost = ExchangeCost(name="all_to_all", fixed_s=3.4e-3, within_s=0.0, between_s=1e-8, hidden=0.6)
    links = MeasuredLinks(exchanges=(cost,), took_s=0.31)
    assert links.lines() == [
        "links: all_to_all takes 3.40 ms a layer, rows go at 100 MB/s between domains, 60% of it can run under experts "
        "(measured in 0.31 s)"
    ]
