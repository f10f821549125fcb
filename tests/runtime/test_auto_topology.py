"""`topology="auto"` becomes the layout that suits the machine and the checkpoint, with its reasons in the log."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from moewe.models.families import load_config
from moewe.models.footprint import model_footprint
from moewe.runtime import auto_topology
from moewe.runtime import resolve as resolve_module
from moewe.runtime.config import EngineConfig, ModelOptions, ParallelOptions
from moewe.runtime.options import layout_config
from moewe.runtime.resolve import Resolved, resolve
from moewe.topologies import AUTO, Topology, TopologyError
from moewe.topologies.exchange_cost import ExchangeCost, LayoutLink
from tests.support.fixtures import checkpoint


@pytest.fixture
def host(monkeypatch):
    """A host of 8 cores and as much memory as a test wants, and GPUs if it wants them."""

    def size(num_bytes, gpus=()):
        monkeypatch.setattr(resolve_module, "host_memory_bytes", lambda: num_bytes)
        monkeypatch.setattr(resolve_module, "available_memory_bytes", lambda: num_bytes)
        monkeypatch.setattr(resolve_module, "gpu_memory_bytes", lambda: tuple(gpus))

    monkeypatch.setattr(resolve_module, "host_cores", lambda: 8)
    monkeypatch.setattr(auto_topology, "recall", lambda device: ())
    size(64 << 30)
    return size


def resolved(name: str = "T-QW3", *, device: str = "cpu", topology: str = "auto", **model: object) -> Resolved:
    options = ModelOptions(model=name, path=str(checkpoint(name)))
    return resolve(
        EngineConfig(
            model=msgspec.structs.replace(options, **model), parallel=ParallelOptions(topology=topology, device=device)
        )
    )


@pytest.mark.parametrize("spelled", ["auto", " AUTO ", "Auto"])
def test_auto_stays_open_until_the_machine_is_known(spelled: str) -> None:
    assert layout_config({"model": "m", "topology": spelled}).parallel.topology == AUTO
    assert layout_config({"model": "m", "topology": spelled}, dialect="vllm").parallel.topology == AUTO


def test_a_host_gets_one_rank_with_all_cores_and_reads_why(host, caplog, monkeypatch) -> None:
    caplog.set_level("INFO")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # where it is set, it says how many threads
    found = resolved()
    assert found.topology.long() == found.config.parallel.topology == "EP1DP1[adp=1,atp=1,red=0]"
    assert found.config.parallel.threads == 8
    reasons = [line for line in caplog.messages if line.startswith("--topology auto: ")]
    assert len(reasons) == 2
    assert "EP1DP1, 1 rank on 8 cores" in reasons[0]
    assert "ranks of one host share its memory and cores; " in reasons[1]
    again = resolve(found.config)
    assert again.config == found.config, "what is resolved is no longer open"


def test_links_that_ranks_measured_before_take_the_place_of_assumed_ones(host, caplog, monkeypatch) -> None:
    caplog.set_level("INFO")
    host(64 << 30, gpus=[8 << 30] * 4)
    slow = ExchangeCost(name="all_to_all", fixed_s=1.0, within_s=1e-9, between_s=0.0)
    link = LayoutLink(topology="EP4DP1", cost=slow)
    asked: list[str] = []
    monkeypatch.setattr(auto_topology, "recall", lambda device: asked.append(device) or (link,))
    assert resolved(device="cuda").topology.short() == "EP1DP4" and asked == ["cuda"]
    assert any("assumed ceilings, measured links)" in line for line in caplog.messages)


def test_gpus_are_used_as_they_hold_the_model(host) -> None:
    host(64 << 30, gpus=[8 << 30] * 4)
    assert resolved(device="cuda").topology.num_ranks == 4
    assert resolved("T-LLA", device="cuda").topology.short() == "EP1DP4"


def test_domains_that_a_host_emulates_are_filled_and_compared_where_their_link_was_measured(
    host, caplog, monkeypatch
) -> None:
    caplog.set_level("INFO")
    options = ModelOptions(model="T-QW3", path=str(checkpoint("T-QW3")))

    def chosen() -> str:
        parallel = ParallelOptions(topology="auto", domains="2+2,rate=900,delay=3")
        return resolve(EngineConfig(model=options, parallel=parallel)).topology.long()

    assert chosen() == "EP1DP4[adp=1,atp=1,red=0]"
    assert any("4 of 4 places" in line for line in caplog.messages)
    assert not any("EP4DP1, the next best" in line for line in caplog.messages)
    # Over links that cost nothing the widest group reads least, though of so small a model not by enough.
    links = [
        LayoutLink(topology=topology, cost=ExchangeCost(name=name, fixed_s=1e-9, within_s=1e-15, between_s=1e-15))
        for topology, name in (("EP4DP1[domains=2+2,rate=900,delay=3]", "hierarchical"), ("EP2DP1", "shm"))
    ]
    monkeypatch.setattr(auto_topology, "recall", lambda device: tuple(links))
    assert chosen().startswith("EP1DP4")
    assert any("EP4DP1, the next best" in line and "measured links" in line for line in caplog.messages)


def test_what_fits_nowhere_is_one_line_with_the_fix(host) -> None:
    host(100 << 20)
    with pytest.raises(TopologyError, match=r"--topology auto: no layout of up to 8 cores fits; nearest: T-QW3 on "):
        resolved()


def test_heads_are_divided_where_no_rank_can_hold_them_all(host, caplog) -> None:
    caplog.set_level("INFO")
    config = resolved().config
    model = model_footprint(load_config(checkpoint("T-QW3")), name="m", dtype="float32")
    large = replace(model, attention_bytes=1 << 30, attention_shares=((2, 1 << 29), (4, 1 << 28)))

    def chosen(gpu_bytes: int) -> Topology:
        machine = {"gpus": (gpu_bytes,) * 4, "cores": 8, "host_bytes": 64 << 30}
        return auto_topology.auto_topology(config, large, fixed=False, **machine)

    assert chosen(4 << 30).atp == 1 and not any("divide" in line for line in caplog.messages)
    assert chosen(1300 << 20).atp in (2, 4)
    assert any(line.startswith("--topology auto: no rank can hold all heads, so ") for line in caplog.messages)
    with pytest.raises(TopologyError, match="fits; nearest"):
        chosen(200 << 20)


def test_a_length_that_was_asked_for_has_to_fit(host) -> None:
    roomy = resolved(max_model_len=64)
    assert roomy.config.model.max_model_len == 64 and roomy.fixed_max_model_len
    host(roomy.budget.fixed_bytes * 10 // 9 + (1 << 16))
    assert resolved().config.model.max_model_len < 512
    with pytest.raises(TopologyError, match=r"less than .*max_model_len=512"):
        resolved(max_model_len=512)
