"""The advisor on two emulated domains of two ranks: slow links keep groups inside, fast ones make them wide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from moewe.topologies import Machine, StepLimits, parse_topology
from moewe.topologies.advisor.advisor import Advisor, Rules
from moewe.topologies.advisor.forecast import forecast, link_figure
from moewe.topologies.advisor.ranking import rank_layouts
from moewe.topologies.advisor.records import AdviceError, Facts, Observation, PhaseSeen
from moewe.topologies.cost import Ceilings, Link, Workload
from moewe.topologies.exchange_choice import ExchangeFacts
from moewe.topologies.exchange_cost import ExchangeCost, LayoutLink
from tests.topologies.test_budget import GIB, MODEL

LIMITS = StepLimits(max_num_batched_tokens=512, max_model_len=4096, max_num_seqs=64, block_size=16)
CEILINGS = Ceilings(
    memory_bandwidth=5e9,
    flops=1e12,
    within=Link(bandwidth=5e9, latency=2e-5),
    between=Link(bandwidth=1e9, latency=1e-4),
)
SHM = LayoutLink(topology="EP2DP2", cost=ExchangeCost(name="shm", fixed_s=2e-4, within_s=1e-9, between_s=0.0))
INSIDE, WIDE = "EP2DP2[adp=2,atp=1,red=0]", "EP4DP1[adp=4,atp=1,red=0,domains=2+2{}]"


def crossing(fixed_s: float, slowed: str) -> LayoutLink:
    cost = ExchangeCost(name="hierarchical", fixed_s=fixed_s, within_s=1e-9, between_s=2e-9)
    return LayoutLink(topology=f"EP4DP1[domains=2+2{slowed}]", cost=cost)


def facts(topology: str, links: Sequence[LayoutLink], *, slowed: str = "", **more: Any) -> Facts:
    spelled = parse_topology(f"EP4DP1[domains=2+2{slowed}]")
    machine = Machine(
        num_devices=4, memory_bytes=8 * GIB, domain_size=2, ceilings=CEILINGS, unit="core", links=tuple(links),
        domains=(2, 2), rate=spelled.rate, delay=spelled.delay,
    )  # fmt: skip
    return Facts(topology=topology, footprint=MODEL, limits=LIMITS, machine=machine, start_s=10.0, **more)


def window(known: Facts, *, rows: float = 64, slower: float = 1.0, steps: float = 100, idle: float = 0.0,
           **more: Any) -> Observation:  # fmt: skip
    """Return what a server of that kind would show whose exchanges are so many times slower than at its start."""
    topology = parse_topology(known.topology)
    cost = forecast(MODEL, topology, Workload(rows=rows, context=100), known.machine)
    exchange = slower * cost.exchange_seconds
    phase = PhaseSeen(
        phase="decode", steps=steps, rows=rows, busy_s=cost.memory_seconds + exchange + 2e-3, host_s=1e-3,
        routed_bytes=cost.expert_bytes, weight_bytes=cost.shared_bytes, kv_bytes=cost.kv_bytes, flops=0.0,
        routed_flops=0.0,
    )  # fmt: skip
    values: dict[str, Any] = {
        "time": 1e9, "seconds": 30.0, "phases": (phase,) if steps else (), "link_s": steps * exchange,
        "running": rows, "context": 100, "shares": {"idle": idle, "memory": 1 - idle}, "bound": "memory",
    }  # fmt: skip
    return Observation(**values | more)


def test_a_slow_link_keeps_groups_inside_a_domain() -> None:
    slowed = ",rate=20,delay=5000"
    advisor = Advisor(facts(WIDE.format(slowed), [SHM, crossing(60e-3, slowed)], slowed=slowed))
    said = [advisor.observe(window(advisor.facts)) for _ in range(4)]
    assert [one.verdict for one in said] == ["observing", "observing", "change", "change"]
    assert {one.advised for one in said[2:]} == {INSIDE} and said[2].gain > 0.1
    assert "EP2DP2 reads 1.97 times" in said[2].reason and "of a step in exchanges, not" in said[2].reason
    assert "decode reads" in said[2].reason and "routed weights" in said[2].reason
    assert said[2].reason.endswith("; the change takes about 10 s beside what runs")
    # From inside, wider is seen to be held back by its exchange, and by nothing else.
    inside = Advisor(facts(INSIDE, [SHM, crossing(60e-3, slowed)], slowed=slowed))
    held = [inside.observe(window(inside.facts)) for _ in range(3)][-1]
    assert held.verdict == "exchange_bound" and "wider would not help: bound by exchange, EP4DP1 halves" in held.reason


def test_a_fast_link_makes_groups_wide() -> None:
    advisor = Advisor(facts(INSIDE, [SHM, crossing(1e-3, "")]))
    said = [advisor.observe(window(advisor.facts)) for _ in range(3)][-1]
    assert (said.verdict, said.advised) == ("change", WIDE.format(""))
    assert "EP4DP1 halves routed bytes a rank and adds" in said.reason and "between domains" in said.reason
    wide = Advisor(facts(WIDE.format(""), [SHM, crossing(1e-3, "")]))
    stays = [wide.observe(window(wide.facts)) for _ in range(3)][-1]
    assert stays.verdict == "stay" and "nothing to gain" in stays.reason and stays.advised == WIDE.format("")


def test_what_was_observed_scales_what_was_measured_at_the_start() -> None:
    """The link became ten times slower than at the start: no probe knows, but steps do."""
    known = facts(WIDE.format(""), [SHM, crossing(15e-3, "")])
    assert rank_layouts(known, window(known)).candidates[0].topology == known.topology
    ranking = rank_layouts(known, window(known, slower=10))
    assert ranking.candidates[0].topology == INSIDE
    assert ranking.calibration.exchange == pytest.approx(10)
    assert ranking.calibration.observed_s > 1.5 * ranking.calibration.predicted_s
    # The layout that runs is predicted to take what it took, whatever the machine does beside the model.
    same = rank_layouts(known, window(known, slower=2))
    assert same.here.step_s == pytest.approx(same.calibration.observed_s, rel=1e-9)
    late = rank_layouts(known, window(known, slower=2, wait_s=30.0))
    assert late.here.step_s == pytest.approx(late.calibration.observed_s, rel=1e-9)
    alone = next(one for one in late.candidates if one.topology.startswith("EP1"))
    assert late.calibration.meet_s > 0.1 and alone.gain > same.candidates[-1].gain, "alone, nobody comes late"
    assert same.calibration.rest_s == 0.0 and same.calibration.products > 1 and same.here.gain == 0.0
    on_gpus = replace(known, machine=replace(known.machine, exchange=ExchangeFacts(device="cuda")))
    launches = rank_layouts(on_gpus, window(on_gpus)).calibration
    assert launches.rest_s == pytest.approx(1e-3, rel=1e-6) and launches.products == 1.0


def test_advice_does_not_flap() -> None:
    known = facts(WIDE.format(""), [SHM, crossing(15e-3, "")])
    advisor = Advisor(known)
    for turn in range(12):  # one window in two is slow: never three in a row
        said = advisor.observe(window(known, slower=10 if turn % 2 else 1))
        assert said.verdict in ("observing", "stay"), said.reason
    for _ in range(3):
        said = advisor.observe(window(known, slower=10))
    assert said.verdict == "change"
    said = advisor.observe(window(known))  # one good window takes nothing back
    assert said.verdict == "change" and said.gain < 0
    verdicts = [advisor.observe(window(known)).verdict for _ in range(2)]
    assert verdicts == ["change", "stay"]


def test_a_small_gain_and_one_that_never_pays_are_no_advice() -> None:
    known = facts(INSIDE, [SHM, crossing(1e-3, "")])
    gain = rank_layouts(known, window(known)).candidates[0].gain
    high = Advisor(known, Rules(margin=gain + 0.01))
    assert [high.observe(window(known)) for _ in range(4)][-1].verdict == "stay"
    slow_start = replace(known, start_s=2 * gain * 3600)
    never = Advisor(slow_start)
    assert [never.observe(window(slow_start)) for _ in range(4)][-1].verdict == "stay"


def test_idle_servers_and_empty_windows_gain_nothing() -> None:
    advisor = Advisor(facts(INSIDE, [SHM, crossing(1e-3, "")]))
    assert advisor.observe(window(advisor.facts, steps=0)).verdict == "idle"
    few = advisor.observe(window(advisor.facts, steps=3))
    assert few.verdict == "observing" and "3 steps in 30 s" in few.reason
    lazy = Advisor(advisor.facts)
    said = [lazy.observe(window(advisor.facts, idle=0.9)) for _ in range(3)]
    assert {one.verdict for one in said} == {"idle"} and "idle 90% of the time" in said[-1].reason
    assert said[-1].gain > Rules().margin, "a faster layout is there, and nobody needs it"
    assert lazy.observe(window(advisor.facts)).verdict == "observing", "idle windows are none of the three"


def test_an_advice_outlives_bursts_and_not_an_idle_server() -> None:
    known = facts(INSIDE, [SHM, crossing(1e-3, "")])
    busy, empty, short = window(known), window(known, steps=0), window(known, steps=3)
    advisor = Advisor(known)
    assert [advisor.observe(busy).verdict for _ in range(3)][-1] == "change"
    for turn in range(6):
        said = advisor.observe(busy if turn % 2 else empty)
        assert (said.verdict, said.advised, said.number) == ("change", WIDE.format(""), turn + 4), said.reason
    assert {advisor.observe(short).verdict for _ in range(4)} == {"change"}, "few steps say nothing either way"
    said = advisor.observe(empty)
    assert said.reason.startswith("0 steps in 30 s; the advice stands for now: decode reads")
    idle = window(known, idle=0.9)
    assert [advisor.observe(one).verdict for one in (idle, empty, busy)] == ["change", "idle", "observing"]


@pytest.mark.parametrize("quiet", [{"steps": 0}, {"steps": 3}, {"idle": 0.9}])
def test_a_window_without_a_winner_breaks_a_streak(quiet: dict[str, float]) -> None:
    known = facts(INSIDE, [SHM, crossing(1e-3, "")])
    busy, between = window(known), window(known, **quiet)
    advisor = Advisor(known)
    said = [advisor.observe(one) for one in (busy, busy, between, busy, busy, busy)]
    assert [one.verdict for one in said[3:]] == ["observing", "observing", "change"]
    assert "leads in 1 of 3 windows" in said[3].reason


def test_a_host_reads_with_all_its_ranks_and_the_reason_says_so() -> None:
    """Two replicas read the experts twice; one rank alone reads a little more than either of them did."""
    known = facts("EP1DP2[adp=1,atp=1,red=0]", [])
    machine = replace(known.machine, num_devices=2, domain_size=2, domains=(), is_shared=True)
    advisor = Advisor(replace(known, machine=machine))
    said = [advisor.observe(window(advisor.facts, rows=16)) for _ in range(3)][-1]
    assert said.advised.startswith("EP1DP1") and said.candidates[0].routed_ratio > 1
    assert "EP1DP1 reads 0.67 times the routed bytes with all ranks: 1.52 times the tokens/s" in said.reason


def test_layouts_without_room_are_out_and_say_why() -> None:
    known = facts(INSIDE, [SHM, crossing(1e-3, "")])
    small = replace(known, machine=replace(known.machine, memory_bytes=2 * GIB))
    said = Advisor(small).observe(window(small))
    assert dict(said.excluded).keys() == {"EP1DP4[adp=1,atp=1,red=0]"}
    assert "a rank needs" in said.excluded[0][1]
    many = window(known, running=1e6)
    assert all("KV holds" in why for _, why in rank_layouts(known, many).excluded)
    assert [one.topology for one in rank_layouts(known, many).candidates] == [known.topology]


def test_links_that_nobody_measured_are_named_as_such() -> None:
    known = facts(INSIDE, [SHM], slowed=",rate=100,delay=1000")
    wide = parse_topology(WIDE.format(",rate=100,delay=1000"))
    figure = link_figure(known.machine, wide)
    assert figure is not None and not figure.is_measured
    assert figure.cost.fixed_s == pytest.approx(6e-3) and figure.cost.between_s == pytest.approx(1e-8 + 1e-9)
    # What was measured at another delay says nothing of this one.
    other = replace(known.machine, links=(crossing(1e-3, ""),))
    assert link_figure(other, wide) == figure
    fast = Advisor(facts(INSIDE, [SHM]))
    said = [fast.observe(window(fast.facts)) for _ in range(3)][-1]
    assert said.verdict == "change" and "nobody measured" in said.reason


def test_popular_experts_are_read_less_and_wait_more() -> None:
    known = facts(INSIDE, [SHM, crossing(1e-3, "")])
    hot = (0.4, 0.3) + (0.3 / 14,) * 14
    even = rank_layouts(known, window(known))
    uneven = rank_layouts(known, window(known, popularity=hot, imbalances=((2, 1.5), (4, 3.0)), wait_s=1.0))

    def wide(ranking: Any) -> Any:
        return next(one for one in ranking.candidates if one.topology.startswith("EP4"))

    assert wide(uneven).routed_ratio > wide(even).routed_ratio
    assert wide(uneven).gain < wide(even).gain


@pytest.mark.parametrize(
    ("field", "value"), [("seconds", -1.0), ("link_s", float("nan")), ("popularity", (1.0,) * 5000),
                         ("popularity", (-1.0,)), ("imbalances", ((2, 3.0),))],
)  # fmt: skip
def test_observations_that_cannot_be_are_refused(field: str, value: Any) -> None:
    known = facts(INSIDE, [SHM])
    with pytest.raises(AdviceError, match=field.removesuffix("s")):
        window(known, **{field: value})
