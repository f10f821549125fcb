"""benchmarks/planner_cpu.py finds constants again and counts comparisons as the page says. Nothing is timed."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from moewe.runtime.messages import Ready
from moewe.topologies.exchange_cost import ExchangeCost, MeasuredLinks
from moewe.topologies.planner.step_time import Constants, step_time


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))  # they import each other as neighbours
    import planner_cpu

    return planner_cpu


def ready(links: MeasuredLinks | None = None) -> Ready:
    return Ready(
        num_blocks=8, block_size=16, max_model_len=64, max_num_seqs=4, memory_bandwidth=(1e10,), weight_bytes=(1,),
        weight_bytes_read=(1,), pids=(1,), matrix_rates=({"bfloat16": 5e12, "int8": 9e12},), links=links,
    )  # fmt: skip


def test_constants_of_a_machine_that_does_as_the_planner_says_are_found(script: ModuleType) -> None:
    model = script.models()[script.FITTED_ON]
    truth = Constants(memory_efficiency=0.7, flops_efficiency=0.3, layer_seconds=2e-4)
    done = script.Measured([ready()], {})
    asked = script.setting(model, "EP1DP1", script.host(done), done, truth)
    seconds = {rows: step_time(asked, script.rows_of("EP1DP1", rows, 32)).seconds for rows in script.BATCHES}
    found = script.fit(model, script.host(done), script.Measured([ready()], seconds))
    assert found.memory_efficiency == pytest.approx(0.7) and found.flops_efficiency == pytest.approx(0.3)
    assert found.layer_seconds == pytest.approx(2e-4)


def test_an_exchange_takes_what_the_ranks_of_its_layout_measured(script: ModuleType) -> None:
    cost = ExchangeCost(name="hierarchical", fixed_s=1e-3, within_s=0.0, between_s=5e-9)
    done = script.Measured([ready(MeasuredLinks(exchanges=(cost,)))], {})
    topology = script.LAYOUTS["slow link"][2]
    asked = script.setting(script.models()["fine"], topology, script.host(done), done, script.MEASURED)
    part = step_time(asked, script.rows_of(topology, 8, 32)).part("exchange")
    assert asked.link == cost and part.seconds == pytest.approx(12 * 1e-3 + part.num_bytes * 5e-9)


def test_only_layouts_that_differ_are_compared(script: ModuleType) -> None:
    one, two, three, four = script.LAYOUTS["shared memory"]

    def points(predicted: tuple[float, ...]) -> list[object]:
        measured = (1.0, 1.04, 1.2, 2.0)
        return [
            script.Point("coarse", name, 2, seconds, guess)
            for name, seconds, guess in zip((one, two, three, four), measured, predicted)
        ]

    assert script.compare(points((1.0, 1.0, 1.2, 2.0))) == (5, 5, 0, 0)
    assert script.compare(points((1.3, 1.0, 1.2, 2.0))) == (5, 4, 0, 0)
    clear = [script.Point("fine", name, 4, time, time) for name, time in zip((one, two, three, four), (1.0, 2, 2, 2))]
    assert script.compare(clear) == (3, 3, 1, 1)


def test_rounds_are_put_together_by_their_medians(script: ModuleType) -> None:
    rounds = [script.Measured([ready()], {2: seconds}).record() for seconds in (3.0, 1.0, 2.0)]
    as_json = [{**each, "seconds": {str(rows): time for rows, time in each["seconds"].items()}} for each in rounds]
    assert script.read(as_json).seconds == {2: 2.0} and script.read(as_json).ready == [ready()]
