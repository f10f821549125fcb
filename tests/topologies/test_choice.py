"""`choose_topology`: always a layout that fits, or one error that says what is missing; and choices one expects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moewe.topologies import (
    KVGroup,
    ModelFootprint,
    StepLimits,
    TopologyError,
    byte_budget,
    check_fits,
    check_runnable,
    choose_topology,
    make_topology,
)
from moewe.topologies.choice import Choice
from moewe.topologies.cost import Workload
from moewe.topologies.exchange_cost import ExchangeCost, LayoutLink
from moewe.topologies.machine import GPU_CEILINGS, HOST_CEILINGS, Machine, with_links
from tests.topologies.test_budget import DENSE, GIB, MIB, MODEL

LIMITS = StepLimits(max_num_batched_tokens=512, max_model_len=4096, max_num_seqs=64, block_size=16)
# 256 experts of 3 * 2048 * 7168 in a byte, 58 layers: as large as the largest open ones.
LARGE = ModelFootprint(
    name="large", num_layers=61, num_moe_layers=58, num_experts=256, top_k=8, attention_bytes=11 * GIB,
    dense_bytes=2 * GIB, shared_bytes=3 * GIB, expert_bytes=42 * MIB, embedding_bytes=2 * GIB, head_bytes=2 * GIB,
    kv_groups=(KVGroup(name="latent", kind="latent", bytes_per_token=70272),), hidden_size=7168, vocab_size=129280,
    max_model_len=163840, activation_itemsize=2, flops_per_token=74 * 10**9,
)  # fmt: skip


def gpus(count: int, memory: int = 80 * GIB, **more: Any) -> Machine:
    fields = {"domain_size": 8, "ceilings": GPU_CEILINGS, "unit": "GPU"} | more
    return Machine(num_devices=count, memory_bytes=memory, **fields)


def host(cores: int, memory: int = 64 * GIB) -> Machine:
    return Machine(num_devices=cores, memory_bytes=memory, domain_size=cores, ceilings=HOST_CEILINGS, is_shared=True,
                   unit="core")  # fmt: skip


def chosen(model: ModelFootprint, machine: Machine, **more: Any) -> Choice:
    found = choose_topology(model, machine, LIMITS, **more)
    assert 1 <= len(found.reasons) <= 2
    assert all(line.startswith("--topology auto: ") and "\n" not in line for line in found.reasons)
    return found


# --- expected choices ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cores", [1, 2, 8, 64])
def test_a_host_runs_one_rank_with_all_its_threads(cores: int) -> None:
    found = chosen(MODEL, host(cores))
    assert found.topology.short() == "EP1DP1" and found.domains == ((0,),)
    if cores > 1:
        assert "ranks of one host share its memory and cores" in found.reasons[1]
        assert "times the bytes a step" in found.reasons[1]


def test_a_dense_model_is_copied_to_all_gpus() -> None:
    assert chosen(DENSE, gpus(4)).topology.short() == "EP1DP4"


def test_a_model_that_needs_all_gpus_of_a_domain_gets_them() -> None:
    found = chosen(LARGE, gpus(8, 141 * GIB))
    assert found.topology.short() == "EP8DP1" and found.domains == (tuple(range(8)),)
    assert "8 of 8 GPUs, 1 domain;" in found.reasons[0]


def test_groups_stay_inside_domains_and_replicas_fill_them() -> None:
    found = chosen(LARGE, gpus(16, 141 * GIB))
    assert found.topology.short() == "EP8DP2"
    assert found.domains == (tuple(range(8)), tuple(range(8, 16)))


def test_a_model_that_no_domain_holds_spans_them_and_says_so() -> None:
    found = chosen(LARGE, gpus(16))
    assert found.topology.short() == "EP16DP1" and len(found.domains) == 2
    assert "no group within a domain of 8 holds the model" in found.reasons[0]


def test_one_wide_domain_is_used_whole_for_many_rows() -> None:
    assert chosen(LARGE, gpus(72, 180 * GIB, domain_size=72)).topology.short() == "EP72DP1"


def test_slow_links_make_replicas_better_than_a_group() -> None:
    slow = replace(GPU_CEILINGS, within=replace(GPU_CEILINGS.within, latency=1e-2))
    assert chosen(MODEL, gpus(4, ceilings=slow)).topology.short() == "EP1DP4"


def test_links_that_were_measured_slow_make_replicas_and_the_reason_says_so() -> None:
    cost = ExchangeCost(name="all_to_all", fixed_s=2e-2, within_s=1e-9, between_s=0.0)
    found = chosen(MODEL, gpus(4, ceilings=with_links(GPU_CEILINGS, cost), has_measured_links=True))
    assert found.topology.short() == "EP1DP4"
    assert "assumed ceilings, measured links)" in found.reasons[1]
    assert "assumed ceilings)" in chosen(MODEL, gpus(4)).reasons[1]


@pytest.mark.parametrize(("fixed_s", "expected"), [(1e-3, "EP4DP1"), (6e-2, "EP2DP2")])
def test_groups_cross_domains_whose_link_was_measured_where_that_is_faster(fixed_s: float, expected: str) -> None:
    slow = replace(GPU_CEILINGS, memory_bandwidth=5e9)
    machine = gpus(4, 8 * GIB, domain_size=2, domains=(2, 2), delay=10, ceilings=slow)
    assert chosen(MODEL, machine).topology.ep <= 2, "an unknown link is not crossed without need"
    cost = ExchangeCost(name="hierarchical", fixed_s=fixed_s, within_s=1e-9, between_s=1e-9)
    link = LayoutLink(topology="EP4DP1[domains=2+2,delay=10]", cost=cost)
    found = chosen(MODEL, replace(machine, links=(link,)), workload=Workload(rows=64, context=100))
    assert found.topology.short() == expected
    assert found.topology.domains == ((2, 2) if expected == "EP4DP1" else ())


def test_room_for_a_sequence_comes_before_speed() -> None:
    small = MODEL.replicated_bytes + 512 * MIB + 700 * MIB
    slow = replace(GPU_CEILINGS, within=replace(GPU_CEILINGS.within, latency=1e-2))
    found = chosen(MODEL, gpus(8, small, ceilings=slow))
    assert found.topology.ep > 1
    budget = byte_budget(MODEL, found.topology, LIMITS, rank_memory_bytes=small)
    assert budget.longest_sequence == 4096


def test_heads_are_split_only_where_that_may_be() -> None:
    heavy = replace(MODEL, attention_bytes=60 * GIB, expert_bytes=1 * MIB)
    with pytest.raises(TopologyError, match="nearest"):
        choose_topology(heavy, gpus(4, 40 * GIB), LIMITS)
    found = chosen(heavy, gpus(4, 40 * GIB), most_atp=4)
    assert found.topology.atp > 1


# --- refusals --------------------------------------------------------------------------------------------------------
def test_what_fits_nowhere_is_refused_with_the_nearest_and_a_fix() -> None:
    with pytest.raises(TopologyError) as error:
        choose_topology(LARGE, gpus(8), LIMITS)
    text = str(error.value)
    assert "\n" not in text
    assert text.startswith("--topology auto: no layout of up to 8 GPUs fits; nearest: large on EP8DP1 needs ")
    assert "or wider" in text
    with pytest.raises(
        TopologyError, match=r"up to 2 cores fits; nearest: m on EP1DP1 needs .* a rank may use 1\.00 GiB"
    ):
        choose_topology(MODEL, host(2, 1 * GIB), LIMITS)


def test_a_length_that_was_asked_for_and_does_not_fit_is_named() -> None:
    memory = MODEL.total_bytes + 700 * MIB
    assert chosen(MODEL, host(1, memory)).topology.short() == "EP1DP1"
    with pytest.raises(TopologyError, match="max_model_len"):
        choose_topology(MODEL, host(1, memory), replace(LIMITS, max_model_len=100_000), least_model_len=100_000)


@pytest.mark.parametrize("field", ["num_devices", "memory_bytes", "domain_size"])
def test_machines_without_anything_are_refused(field: str) -> None:
    with pytest.raises(TopologyError, match=f"{field}=0"):
        replace(gpus(2), **{field: 0})


# --- always ----------------------------------------------------------------------------------------------------------
@settings(deadline=None)
@given(
    devices=st.integers(1, 40),
    memory=st.integers(256, 32768),
    domain=st.integers(1, 16),
    is_shared=st.booleans(),
    experts=st.integers(0, 24),
    expert_mib=st.integers(1, 256),
    attention_mib=st.integers(1, 4096),
    most_atp=st.sampled_from([1, 4]),
)
def test_what_is_chosen_runs_and_fits(
    devices: int, memory: int, domain: int, is_shared: bool, experts: int, expert_mib: int, attention_mib: int,
    most_atp: int,
) -> None:  # fmt: skip
    has = experts > 0
    model = replace(MODEL, num_experts=experts, expert_bytes=expert_mib * MIB * has, top_k=min(2, experts),
                    num_moe_layers=4 * has, attention_bytes=attention_mib * MIB)  # fmt: skip
    machine = Machine(num_devices=devices, memory_bytes=memory * MIB, domain_size=domain, is_shared=is_shared,
                      ceilings=HOST_CEILINGS if is_shared else GPU_CEILINGS)  # fmt: skip
    try:
        found = choose_topology(model, machine, LIMITS, most_atp=most_atp)
    except TopologyError as error:
        assert "nearest" in str(error) and "\n" not in str(error)
        ep = min(devices, experts or 1)
        for narrow in range(1, ep + 1):  # nothing that one would think of does fit
            with pytest.raises(TopologyError):
                check(model, machine, narrow)
        return
    topology = found.topology
    assert topology.num_ranks <= devices and topology.atp <= most_atp
    assert sorted(rank for ranks in found.domains for rank in ranks) == list(range(topology.num_ranks))
    assert all(len(ranks) <= domain for ranks in found.domains)
    budget = byte_budget(model, topology, LIMITS, rank_memory_bytes=machine.rank_memory(topology.num_ranks))
    assert budget.total <= budget.rank_memory_bytes and budget.longest_sequence >= 2
    if most_atp == 1:
        check_runnable(topology, num_experts=experts, num_ranks_available=devices)


def check(model: ModelFootprint, machine: Machine, ep: int) -> None:
    limits = replace(LIMITS, max_model_len=2)
    check_fits(byte_budget(model, make_topology(ep), limits, rank_memory_bytes=machine.rank_memory(ep)))
