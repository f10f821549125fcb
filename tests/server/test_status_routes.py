"""Models, topology, health and readiness, and paths that do not exist."""

from __future__ import annotations

import msgspec
import numpy as np

from moewe.runtime.metrics.ranks import ReplicaMetrics
from moewe.runtime.plan import pack
from moewe.runtime.rank_stats import BalanceStats
from moewe.server.http.topology_view import HOTTEST, hottest_experts
from moewe.server.state import Phase
from moewe.topologies.exchange_cost import ExchangeCost, MeasuredLinks
from tests.support.asking import error_of, fake, get, post
from tests.support.fake_replicas import make_state


def test_models_are_listed_under_every_name() -> None:
    state = make_state(fake())
    assert [card["id"] for card in get(state, "/v1/models").json()["data"]] == ["gull", "moewe"]
    assert get(state, "/v1/models/moewe").json()["max_model_len"] == 64
    assert get(state, "/v1/models/nope").status_code == 404
    assert get(state, "/v1/models/../../etc/passwd").status_code == 404


def test_topology_shows_ranks_slots_and_processes() -> None:
    state = make_state(fake())
    view = get(state, "/v1/topology").json()
    assert view["topology"] == "EP2DP1[adp=2,atp=1,red=0]" and view["num_ranks"] == 2
    ranks = view["replicas"][0]["ranks"]
    assert [(rank["slots"], rank["experts"], rank["pid"]) for rank in ranks] == [
        ([0, 2], [0, 1], 11),
        ([2, 4], [2, 3], 12),
    ]
    assert view["expert_ranks"] == [0, 0, 1, 1] and view["expert_replicas"] == {}
    assert [rank["domain"] for rank in ranks] == [0, 0]
    drawing = get(state, "/v1/topology", params={"format": "text"}).text
    assert "experts of a replica: ranks 0..1: slots 0..3, 2 each" in drawing
    assert "domain 0: 2 ranks, 4 slots, 4 experts\n" in drawing
    assert "  rank 1  slots 2-3  experts 2 3\n" in drawing and "EP2DP1" in drawing
    assert get(state, "/v1/topology", params={"format": "png"}).status_code == 400


def test_topology_shows_where_experts_stand_after_moves() -> None:
    state = make_state(fake())
    state.config = msgspec.structs.replace(
        state.config, parallel=msgspec.structs.replace(state.config.parallel, eplb="auto")
    )
    moved = BalanceStats(placement=3, slots=pack(np.array([0, 3, 2, 1])), moves=2, rounds=1, failures=1)
    fresh = state.latest_stats
    state.latest_stats = lambda: [msgspec.structs.replace(one, balance=moved) for one in fresh()]
    view = get(state, "/v1/topology").json()
    assert view["eplb"] == "auto" and view["expert_ranks"] == [0, 1, 1, 0]
    replica = view["replicas"][0]
    assert (replica["placement"], replica["moves"], replica["failed_rounds"]) == (3, 2, 1)
    assert [rank["experts"] for rank in replica["ranks"]] == [[0, 3], [2, 1]]
    drawing = get(state, "/v1/topology", params={"format": "text"}).text
    assert "  rank 1  slots 2-3  experts 2 1\n" in drawing or "  rank 1  slots 2-3  experts 1 2\n" in drawing


def test_topology_shows_what_links_cost() -> None:
    state = make_state(fake())
    assert get(state, "/v1/topology").json()["replicas"][0]["links"] is None
    cost = ExchangeCost(name="all_to_all", fixed_s=0.0034, within_s=0.0, between_s=1e-8, hidden=0.6)
    links = MeasuredLinks(exchanges=(cost,), took_s=0.31)
    state.ready = [msgspec.structs.replace(state.ready[0], links=links)]
    assert get(state, "/v1/topology").json()["replicas"][0]["links"] == {
        "exchanges": [
            {
                "exchange": "all_to_all",
                "fixed_us": 3400.0,
                "domain_bytes_per_second": None,
                "between_bytes_per_second": 100_000_000,
                "hidden": 0.6,
            }
        ],
        "measured_in_seconds": 0.31,
    }
    assert links.lines()[0] in get(state, "/v1/topology", params={"format": "text"}).text


def test_topology_names_the_hottest_experts() -> None:
    state = make_state(fake())
    assert get(state, "/v1/topology").json()["hottest_experts"] == []
    metrics = state.metrics.replicas.setdefault(0, ReplicaMetrics(0))
    layers = len(state.model_config.moe_layers)
    tokens = np.ones((layers, 4), np.int64)
    tokens[0], tokens[-1] = (0, 0, 8, 0), (1, 1, 1, 5)
    metrics.slots.observe(1.0, {"decode": tokens})
    state.refresh = lambda: None  # what fakes counted is nothing, which would begin the window anew
    hottest = get(state, "/v1/topology").json()["hottest_experts"]
    expected = [{"layer": 0, "expert": 2, "times_mean": 4.0}, {"layer": layers - 1, "expert": 3, "times_mean": 2.5}]
    assert hottest[:2] == (expected if layers > 1 else expected[1:] + hottest[1:2])
    assert len(hottest_experts(np.ones((2, 8)), 2)) == HOTTEST
    assert hottest_experts(np.array([[1, 3], [9, 0]]), 1) == [
        {"layer": 0, "expert": 1, "times_mean": 1.5}, {"layer": 0, "expert": 0, "times_mean": 0.5},
    ]  # fmt: skip
    assert hottest_experts(np.zeros((2, 0)), 2) == hottest_experts(np.zeros((0, 4)), 0) == []


def test_phases_of_health_and_readiness() -> None:
    state = make_state(None)
    assert get(state, "/health").status_code == 200 and get(state, "/ready").status_code == 503
    assert get(state, "/v1/topology").json()["replicas"][0]["ranks"][0]["slots"] == [0, 2]
    response = post(state, "/v1/completions", {"model": "gull", "prompt": "a"})
    assert response.status_code == 503 and int(response.headers["retry-after"]) > 0
    assert error_of(response)["code"] == "loading"
    assert get(state, "/v1/models").status_code == 503
    state = make_state(fake())
    assert get(state, "/health").json() == {"status": "ok"} and get(state, "/ready").status_code == 200
    state.enter(Phase.DRAINING)
    assert get(state, "/health").status_code == 200 and get(state, "/ready").status_code == 503
    assert post(state, "/v1/completions", {"model": "gull", "prompt": "a"}).status_code == 503
    state.problem = "rank 1 was killed"
    state.enter(Phase.FAILED)
    assert get(state, "/health").status_code == 503 and "rank 1" in get(state, "/health").json()["reason"]
    state.enter(Phase.READY)
    assert state.phase is Phase.FAILED


def test_unknown_paths_and_methods_answer_with_error_objects() -> None:
    state = make_state(fake())
    assert error_of(get(state, "/v1/nothing"))["code"] == "not_found"
    response = get(state, "/v1/completions")
    assert response.status_code == 405 and "not served" in error_of(response)["message"]
    assert get(state, "/version").json()["version"]
