"""Whether decode steps are captured, how many rows they have, and that KV gets what graphs leave."""

from __future__ import annotations

import pytest

from moewe.runtime import resolve as resolve_module
from moewe.runtime.resolve import resolve
from tests.runtime.test_resolve import config


@pytest.fixture
def gpus(monkeypatch):
    def have(number):
        monkeypatch.setattr(resolve_module, "gpu_memory_bytes", lambda: (2 << 30,) * number)

    return have


def test_graphs_are_chosen_and_paid_for_before_kv(gpus, caplog):
    caplog.set_level("INFO")
    gpus(4)
    on_gpu = {"parallel": {"device": "cuda"}, "cache": {"kv_cache_memory_bytes": 8 << 20}}
    found = resolve(config("EP2DP1", **on_gpu))
    sizes, num_bytes = found.config.graphs.graph_rows, found.config.graphs.graph_bytes
    assert sizes == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64) and num_bytes > 0
    assert {line.name: line.num_bytes for line in found.budget.lines}["CUDA graphs (estimate)"] == num_bytes
    assert resolve(found.config).config == found.config and "decode steps of 1, 2, 4" in caplog.text
    fewer = resolve(config("EP2DP1", graphs={"cuda_graph_max_bs": 4}, **on_gpu)).config.graphs
    assert fewer.graph_rows == (1, 2, 4) and 0 < fewer.graph_bytes < num_bytes
    eager = resolve(config("EP2DP1", graphs={"enforce_eager": True}, **on_gpu))
    assert eager.budget.total == found.budget.total - num_bytes and not eager.config.graphs.graph_bytes


@pytest.mark.parametrize(
    ("topology", "sections", "reason"),
    [
        ("EP2DP1", {"parallel": {"exchange": "all_to_all"}}, "the exchange all_to_all asks the device"),
        ("EP2DP1[adp=1,atp=2]", {}, "divide the heads"),
        ("EP1DP1", {"graphs": {"enforce_eager": True}}, "enforce_eager"),
    ],
)
def test_where_no_step_can_be_captured_the_log_says_why(gpus, caplog, topology, sections, reason):
    caplog.set_level("INFO")
    gpus(4)
    sections = sections | {"parallel": {"device": "cuda"} | sections.get("parallel", {})}
    found = resolve(config(topology, **sections)).config
    assert found.graphs.enforce_eager and not found.graphs.graph_rows and reason in caplog.text
    assert resolve(found).config == found


@pytest.mark.parametrize(
    ("device", "graphs", "words"),
    [
        ("cuda", {"cuda_graph_sizes": (100, 200)}, "has no size that a decode step here can have; use smaller ones"),
        ("cuda", {"cuda_graph_sizes": (0, 2)}, "use numbers of rows from 1 on"),
        ("cuda", {"cuda_graph_max_bs": 0}, "use at least 1 row"),
        ("cuda", {"cuda_graph_sizes": (4,), "enforce_eager": True}, "leave one of the two out"),
        ("cpu", {"cuda_graph_sizes": (4,)}, "a CPU has no CUDA graphs"),
        ("cpu", {"cuda_graph_max_bs": 4}, "a CPU has no CUDA graphs"),
    ],
)
def test_graphs_that_cannot_be_are_one_line(gpus, device, graphs, words):
    gpus(1)
    with pytest.raises(ValueError, match="cuda_graph") as caught:
        resolve(config("EP1DP1", parallel={"device": device}, graphs=graphs))
    assert words in str(caught.value) and "\n" not in str(caught.value)
