"""The search: every layout that fits is there, fronts hold what nobody beats, targets are kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moewe.topologies import TopologyError, parse_topology
from moewe.topologies.layout import load_layout
from moewe.topologies.planner.routing import zipf
from moewe.topologies.planner.search import Searched, Space, Targets, pareto, search, widths
from moewe.topologies.planner.serving import Workload
from tests.topologies.planner.test_step_time import MACHINE, MODEL, setting

ROOMY = replace(MACHINE, memory_bytes=4e9, memory_bandwidth=1e5, bf16_flops=1e9, scale_up_bandwidth=1e6,
                dispatch_latency=1e-3, combine_latency=1e-3, between_dispatch_latency=1e-2,
                between_combine_latency=1e-2, scale_out_bandwidth=1e4)  # fmt: skip
FAST = replace(setting().constants, layer_seconds=1e-3)
SPACE = Space(
    models={"bf16": replace(MODEL, footprint=replace(MODEL.footprint, max_model_len=4096))},
    setting=setting(hardware=ROOMY, constants=FAST),
    num_gpus=6,
    workload=Workload(isl=64, osl=32),
)


def found(targets: Targets | None = None, **changes: object) -> Searched:
    return search(replace(SPACE, **changes), targets or Targets())  # type: ignore[arg-type]


def test_every_width_is_there_and_every_layout_can_be_planned() -> None:
    searched = found()
    layouts = [load_layout(point.layout) for point in searched.best]
    together = {layout.single().ep for layout in layouts if len(layout.pools) == 1}
    assert together == {1, 2, 3, 4, 5, 6}
    apart = [layout for layout in layouts if len(layout.pools) == 2]
    assert {layout.pools["decode"].ep for layout in apart} >= {1, 2, 3, 4}
    assert all(layout.num_ranks <= 6 for layout in layouts)
    assert {layout.single().atp for layout in layouts if len(layout.pools) == 1} == {1, 2}


def test_best_is_sorted_and_the_front_is_not_beaten() -> None:
    searched = found()
    rates = [point.gpu_rate for point in searched.best]
    assert rates == sorted(rates, reverse=True) and rates[0] == searched.front[0].gpu_rate
    for point in searched.best:
        user, gpu = point.served.user_rate, point.gpu_rate
        assert any(other.served.user_rate >= user and other.gpu_rate >= gpu for other in searched.front)
    front = [(point.served.user_rate, point.gpu_rate) for point in searched.front]
    assert front == sorted(front, key=lambda pair: (pair[0], -pair[1]))
    assert [gpu for _, gpu in front] == sorted((gpu for _, gpu in front), reverse=True)
    assert pareto([]) == ()


def test_targets_are_kept_and_cost_throughput() -> None:
    free = found()
    tight = Targets(tpot=2 * min(point.served.tpot for point in free.front), ttft=0.5)
    kept = found(tight)
    assert kept.best and all(tight.met_by(p.served.ttft, p.served.tpot) for p in (*kept.best, *kept.front))
    assert kept.best[0].gpu_rate <= free.best[0].gpu_rate
    assert found(Targets(tpot=1e-9)).best == ()


def test_what_does_not_fit_is_left_out_and_said() -> None:
    roomy = SPACE.models["bf16"]
    heavy = replace(roomy, footprint=replace(roomy.footprint, expert_bytes=20_000_000, hidden_size=2000))
    small = replace(SPACE.setting, hardware=replace(ROOMY, memory_bytes=1.3e9))
    searched = found(setting=small, models={"bf16": heavy}, apart=False)
    assert searched.refused > 0 and "use EP3DP1" in found(setting=small, models={"bf16": heavy}, num_gpus=3).why
    assert min(parse_topology(point.layout).ep for point in searched.best) > 1
    with pytest.raises(TopologyError, match="no layout of 6 GPUs fits; the last that was tried"):
        found(setting=replace(SPACE.setting, hardware=replace(ROOMY, memory_bytes=1e6)))


def test_spare_slots_are_tried_where_experts_are_not_alike() -> None:
    skewed = found(setting=replace(SPACE.setting, popularity=zipf(1.0, 16)), apart=False)
    assert {parse_topology(point.layout).red > 0 for point in skewed.best} == {True, False}
    assert all(parse_topology(point.layout).red == 0 for point in found(apart=False).best)


def test_widths_leave_out_what_is_not_better() -> None:
    assert widths(8, 256) == list(range(1, 9)) and widths(64, 4) == [1, 2, 3, 4] and widths(4, 0) == [1]
    tried = widths(288, 256)
    assert tried[-1] == 256 and {72, 96, 144, 128} <= set(tried) and len(tried) < 60
