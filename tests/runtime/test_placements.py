"""Static placement: the option is checked, the load travels in the config, and everybody sees the same map."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from moewe.models.families import load_config
from moewe.moe.wide_ep.balancing import ExpertLoad, expected_imbalance, read_load, write_load
from moewe.moe.wide_ep.placement import balanced_placement, first_placement, linear_placement, traffic
from moewe.moe.wide_ep.synthetic import correlated
from moewe.moe.wide_ep.traces import RoutingTrace, save_trace
from moewe.runtime.config import CacheOptions, EngineConfig, ModelOptions, ParallelOptions
from moewe.runtime.options import engine_config, layout_config
from moewe.runtime.placements import expert_placement, placement_note
from moewe.runtime.ranges import moves_experts
from moewe.runtime.rank_parts import build_hub
from moewe.runtime.resolve import resolve
from moewe.server.cli.main import main
from moewe.server.commands.serve import announcement
from moewe.server.flags.table import without_aliases
from moewe.topologies import RankGrid, parse_topology
from tests.support.fixtures import checkpoint

NAME = "T-QW3"


def skewed(name: str = NAME) -> np.ndarray:
    """A few experts of each layer get most: [L, E] i64."""
    model = load_config(checkpoint(name))
    assert model.moe is not None
    shape = len(model.moe_layers), model.moe.routing.num_experts
    rng = np.random.default_rng(3)
    load = np.sort(rng.zipf(1.3, shape).clip(max=1000)).astype(np.int64)
    load[::2] = load[::2, ::-1]
    return load


def config(eplb: str, topology: str = "EP2DP1[red=2]", name: str = NAME) -> EngineConfig:
    return EngineConfig(
        model=ModelOptions(model=name, path=str(checkpoint(name))),
        parallel=ParallelOptions(topology=topology, eplb=eplb),
        cache=CacheOptions(num_blocks=64),
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_load(ExpertLoad(phases={"decode": skewed()}), tmp_path / "a load.json")
    return tmp_path / "a load.json"


def test_ranks_and_displays_place_experts_by_the_file(file: Path) -> None:
    found = resolve(config(f"static {file}"))
    file.unlink()  # what was read at the start is what counts
    placement = expert_placement(found.config, found.model)
    plain = linear_placement(*skewed().shape, 2)
    assert expected_imbalance(placement, skewed()).mean() < expected_imbalance(plain, skewed()).mean() - 0.1
    assert (placement.physical_to_logical != placement.physical_to_logical[0]).any(), "each layer by its own load"
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(found.config), type=EngineConfig)
    again = expert_placement(sent, found.model)
    np.testing.assert_array_equal(again.physical_to_logical, placement.physical_to_logical)
    np.testing.assert_array_equal(again.slot_of, placement.slot_of)
    assert build_hub(found.config, 2).shape.slot_ranges == placement.slot_ranges
    note = placement_note(found.config, found.model)
    assert "a load.json" in note and "in order" in note and note in announcement(found)


def test_groups_of_the_router_stay_in_a_domain(tmp_path: Path) -> None:
    """A token of DeepSeek's takes experts of few groups: those of one group stand together where domains have room."""
    model = load_config(checkpoint("T-DS3"))
    assert model.moe is not None
    routing, layers = model.moe.routing, len(model.moe_layers)
    assert routing.num_groups > 1
    load = np.random.default_rng(5).integers(90, 110, (layers, routing.num_experts))
    write_load(ExpertLoad(phases={"decode": load}), tmp_path / "load.json")
    topology = "EP4DP1[domains=2+2]"
    found = resolve(config(f"static {tmp_path / 'load.json'}", topology, "T-DS3"))
    placement = expert_placement(found.config, found.model)
    domains = RankGrid(parse_topology(topology), 4).domains()
    expected = balanced_placement(load, num_redundant=0, domains=domains, num_groups=routing.num_groups)
    assert (placement.physical_to_logical == expected.physical_to_logical).all()
    size = routing.num_experts // routing.num_groups
    for layer in range(layers):
        slots = placement.logical_to_physical[layer][:, 0]
        where = np.asarray(placement.rank_domain)[placement.slot_rank[slots]].reshape(routing.num_groups, size)
        assert (where == where[:, :1]).all(), where


def test_experts_that_fire_together_stand_in_one_domain_where_a_trace_was_recorded(tmp_path: Path) -> None:
    """The way that users go: a trace, `moewe replay --load`, `--eplb static`; every rank gets the same slots."""
    layers, experts = skewed().shape
    ids = np.stack([correlated(4000, experts, 2, seed=seed, team_size=2, exponent=0.1) for seed in range(layers)])
    save_trace(RoutingTrace(num_experts=experts, ids={"decode": ids[:, :2000]}), tmp_path / "t.npz")
    path, topology = tmp_path / "load.json", "EP4DP1[domains=2+2]"
    with pytest.raises(SystemExit):
        main(["replay", "--trace", str(tmp_path / "t.npz"), "--topology", topology, "--load", str(path)])
    read = read_load(path, num_layers=layers, num_experts=experts)
    loads_alone = tmp_path / "loads.json"
    write_load(ExpertLoad(phases=read.phases), loads_alone)
    source, apart, crossing = np.arange(2000) % 4, [], []
    for file in (loads_alone, path):
        found = resolve(config(f"static {file}", topology))
        assert bool(found.config.parallel.eplb_slots) == (file == path)
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(found.config), type=EngineConfig)
        placement = expert_placement(sent, found.model)
        domain = placement.rank_domain[placement.slot_rank[placement.logical_to_physical[:, :, 0]]]  # [L, E]
        most = [pairs[:8, :2].T for pairs in read.together]
        apart.append(sum(int((domain[i, a] != domain[i, b]).sum()) for i, (a, b) in enumerate(most)))
        crossing.append(sum(traffic(ids[i, 2000:], placement, i, source).domain_copies for i in range(layers)))
    assert apart[1] == 0 < apart[0] and crossing[1] < crossing[0], (apart, crossing)
    near = resolve(config(f"static {path}", "EP4DP1"))
    assert near.config.parallel.eplb_slots == b"", "in one domain pairs do not count"


def test_off_is_what_was_before() -> None:
    found = resolve(config("off"))
    expected = first_placement(*skewed().shape, num_redundant=2, domains=(0, 0))
    np.testing.assert_array_equal(
        expert_placement(found.config, found.model).physical_to_logical, expected.physical_to_logical
    )
    assert found.config.parallel.eplb_load == b"" and placement_note(found.config, found.model) == ""


def test_paths_are_made_absolute(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    assert resolve(config("static a load.json")).config.parallel.eplb == f"static {file}"


@pytest.mark.parametrize(
    ("eplb", "complaint"),
    [
        ("static", r"eplb='static' is not allowed; use off, auto, or static FILE"),
        ("on", r"eplb='on' is not allowed; use off, auto, or static FILE"),
        ("static /nowhere.json", r"eplb='static /nowhere.json': load file .* cannot be read"),
    ],
)
def test_other_values_are_refused(eplb: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        resolve(config(eplb))


def test_loads_of_other_models_and_dense_models_are_refused(file: Path) -> None:
    with pytest.raises(ValueError, match=r"eplb='static .*: load file .* has num_(layers|experts)=\d+, but the model"):
        resolve(config(f"static {file}", name="T-DS3"))
    for eplb in (f"static {file}", "auto"):
        with pytest.raises(ValueError, match="the model is dense; use off"):
            resolve(config(eplb, topology="EP1DP1", name="T-LLA"))


def test_auto_begins_as_off_and_moves_where_there_are_ranks() -> None:
    found = resolve(config(" auto "))
    assert found.config.parallel.eplb == "auto" and moves_experts(found.config)
    plain = expert_placement(resolve(config("off")).config, found.model)
    np.testing.assert_array_equal(
        expert_placement(found.config, found.model).physical_to_logical, plain.physical_to_logical
    )
    assert "by the load that comes" in placement_note(found.config, found.model)
    alone = resolve(config("auto", topology="EP1DP1"))
    assert not moves_experts(alone.config) and "nothing moves" in placement_note(alone.config, alone.model)


def test_the_load_itself_is_no_option_and_values_are_checked_before_a_model_is_looked_for() -> None:
    with pytest.raises(ValueError, match="eplb_load"):
        engine_config({"model": "m", "eplb_load": b"x"})
    with pytest.raises(ValueError, match="use off, auto, or static FILE"):
        layout_config({"model": "nowhere", "eplb": "always"})


def test_flags_of_others_point_to_ours() -> None:
    for name in ("enable-eplb", "--eplb-config", "init_expert_location"):
        with pytest.raises(ValueError, match="--eplb static FILE"):
            engine_config({"model": "m", name: True})
    for name in ("num-redundant-experts", "ep_num_redundant_experts"):
        with pytest.raises(ValueError, match=r"EP8DP1\[red=16\]"):
            engine_config({"model": "m", name: 16})


@pytest.mark.parametrize(
    ("words", "made"),
    [
        (["--eplb", "static", "a.json", "m"], ["--eplb=static a.json", "m"]),
        (["--eplb=static", "a.json"], ["--eplb=static a.json"]),
        (["--eplb", "off", "m"], ["--eplb=off", "m"]),
        (["--eplb", "auto", "m"], ["--eplb=auto", "m"]),
        (["--eplb", "static", "--threads", "1"], ["--eplb=static", "--threads", "1"]),
        (["m", "--eplb"], ["m", "--eplb"]),
    ],
)
def test_static_takes_the_word_behind_it(words: list[str], made: list[str]) -> None:
    assert without_aliases(words) == made
