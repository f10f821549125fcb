"""Counted bytes and operations are those of the tensors that were touched, exactly: every family, topology and format.

The long way (tests/support/touched.py) looks at choices, rows and storages; the counters of a run that nobody watches,
with whole layers in one native call where that can be, must say the same. Chunked prompts, idle ranks and rows that
leave at different times are in every run. What is compared is each component of each phase, and what went how far.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from moewe.runtime.metrics.stats import decode_counters
from moewe.runtime.params import SamplingParams
from moewe.runtime.prompts import packed
from moewe.runtime.replicas import ReplicaSet
from tests.support.fixtures import DENSE_FIXTURES, MOE_FIXTURES, checkpoint, random_prompt
from tests.support.harness import Group, greedy
from tests.support.native import needs_native
from tests.support.polling import finish
from tests.support.quantised import fp8_checkpoint, mxfp4_checkpoint
from tests.support.setups import Setup
from tests.support.touched import Watched, counted_bytes, counted_flops

HALVES, TWICE, FOURTHS = "EP2DP1[atp=2]", "EP4DP1[adp=2,atp=2]", "EP4DP1[atp=4]"
TOPOLOGIES = ("EP1DP1", "EP2DP1", "EP4DP1", HALVES, TWICE, FOURTHS)
Requests = tuple[tuple[int, int], ...]
REQUESTS: Requests = ((11, 5), (3, 2), (19, 3))  # tokens of a prompt, and of its answer

ALWAYS = {
    ("T-QW3", "EP1DP1"), ("T-MIX", "EP2DP1"), ("T-DS3", TWICE), ("T-DS2", "EP1DP1"),
    ("T-GOS", HALVES), ("T-LL4", "EP2DP1"), ("T-OLM", FOURTHS), ("T-LLA", "EP1DP1"),
}  # fmt: skip
# Half of all topologies for each family, with divided heads and without, turn by turn.
SPREAD = {(name, topology) for i, name in enumerate(MOE_FIXTURES) for topology in TOPOLOGIES[i % 2 :: 2]}
FAMILIES = [
    pytest.param(name, topology, marks=() if (name, topology) in ALWAYS else pytest.mark.slow)
    for name, topology in sorted(ALWAYS | SPREAD | {(name, "EP1DP1") for name in DENSE_FIXTURES})
]


def run(group: Group, requests: Requests = REQUESTS) -> None:
    for number, (prompt, answer) in enumerate(requests):
        group.submit(str(number), random_prompt(prompt, seed=number), greedy(answer))
    group.run()
    group.submit("alone", random_prompt(5), greedy(4))  # all ranks but one have nothing
    group.run()


def check(path: Path, setup: Setup, requests: Requests = REQUESTS, *, preempts: bool = False) -> Watched:
    """Run twice, watched and not, and compare both with the long way."""
    with Group(path, setup) as plain, Group(path, setup) as other:
        watched = Watched(other)
        run(plain, requests)
        run(other, requests)
        for rank in range(plain.num_ranks):
            expected_bytes, expected_flops = watched.bytes_of(rank), watched.flops_of(rank)
            for group in (plain, other):
                counters = group.workers[rank].counters
                counted = counted_bytes(counters)
                if plain.atp > 1:  # tests/attention/test_tensor_parallel.py has what its collectives send
                    assert sum(of_phase.pop("exchange") for of_phase in counted.values()) > 0
                else:
                    assert counters.exchange_bytes.tolist() == watched.sent_by(rank)
                assert counted == {
                    phase: {name: expected_bytes[phase][name] for name in found} for phase, found in counted.items()
                }
                assert counted_flops(counters) == expected_flops
        assert {"prefill", "decode", "mixed"} <= set(watched.phases()) and bool(plain.num_preemptions) == preempts
        rows = np.array([[len(ran.positions) for ran in own] for own in watched.steps])
        assert plain.atp == plain.num_ranks or not (rows == 0).all(0).any(), "no step without rows was planned"
    return watched


@pytest.mark.parametrize(("name", "topology"), FAMILIES)
def test_families_at_every_topology(name: str, topology: str) -> None:
    check(checkpoint(name), Setup(topology=topology, max_chunk_tokens=7, keep_logits=False))


NATIVE = [
    ("T-QW3", "EP1DP1", None, "auto"),
    ("T-QW2", "EP2DP1", "int8", "auto"),
    ("T-MIX", "EP1DP1", "int4", "fp8"),
    ("T-DS3", "EP1DP1", "int4", "int8"),
    ("T-DS3", "EP4DP1", None, "fp8"),
    ("T-GOS", HALVES, "int8", "fp8"),
    ("T-GLM", "EP2DP1", "int4", "auto"),
]


@needs_native
@pytest.mark.parametrize(("name", "topology", "quantization", "kv"), NATIVE)
def test_packed_weights_and_scaled_kv(name: str, topology: str, quantization: str | None, kv: str) -> None:
    setup = Setup(
        topology=topology, dtype="bfloat16", quantization=quantization, kv_cache_dtype=kv, max_chunk_tokens=7,
        keep_logits=False,
    )  # fmt: skip
    check(checkpoint(name), setup)


STORED = [
    pytest.param("float32", "EP1DP1", id="torch"),
    pytest.param("bfloat16", "EP1DP1", id="packed", marks=needs_native),
    pytest.param("bfloat16", "EP2DP1", id="packed-EP2", marks=[needs_native, pytest.mark.slow]),
    pytest.param("float32", "EP4DP1", id="torch-EP4", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("dtype", "topology"), STORED)
def test_blocks_of_fp8(dtype: str, topology: str) -> None:
    path, _ = fp8_checkpoint("T-DS3", (48, 40))
    check(path, Setup(topology=topology, dtype=dtype, max_chunk_tokens=7, keep_logits=False))


@pytest.mark.parametrize(("dtype", "topology"), STORED)
def test_mxfp4(dtype: str, topology: str) -> None:
    path, _ = mxfp4_checkpoint("T-GOS")
    check(path, Setup(topology=topology, dtype=dtype, max_chunk_tokens=7, keep_logits=False))


def test_preempted_requests() -> None:
    """What was computed already and is computed again counts again."""
    tight = Setup(num_blocks=9, block_size=4, max_chunk_tokens=7, keep_logits=False)
    check(checkpoint("T-QW3"), tight, ((11, 12), (3, 12), (19, 12)), preempts=True)


DOMAINS = [
    pytest.param("T-QW3", "EP4DP1[domains=2+2]", "auto", id="hierarchical"),
    pytest.param("T-DS3", "EP4DP1[domains=3+1]", "auto", id="shared-rail", marks=pytest.mark.slow),
    pytest.param("T-QW2", "EP4DP1[domains=1+3]", "all_to_all", id="all-to-all"),
    pytest.param("T-MIX", "EP4DP1[domains=2+2]", "padded", id="padded"),
]


@pytest.mark.parametrize(("name", "topology", "exchange"), DOMAINS)
def test_rows_between_domains(name: str, topology: str, exchange: str) -> None:
    setup = Setup(topology=topology, exchange=exchange, max_chunk_tokens=7, keep_logits=False)
    watched = check(checkpoint(name), setup)
    assert all(sum(scope) > 0 for scope in zip(*map(watched.sent_by, range(4)), strict=True))


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        ("T-QW2", "EP2DP1[red=2]"),
        pytest.param("T-QW3", "EP4DP1[red=4,domains=2+2]", marks=pytest.mark.slow),
        pytest.param("T-QW3", "EP4DP1[red=5]", marks=pytest.mark.slow),  # one rank holds a slot more than the others
    ],
)
def test_redundant_slots(name: str, topology: str) -> None:
    """An expert that stands in two slots is read in each that rows of its part of the ranks chose."""
    watched = check(checkpoint(name), Setup(topology=topology, max_chunk_tokens=7, keep_logits=False))
    placement = watched.group.placement
    hits = [
        (layer, int(placement.physical_to_logical[layer, start + slot]))
        for rank, (start, _) in enumerate(placement.slot_ranges)
        for layer, _, slot in watched.hit(rank, 0)
    ]
    assert len(hits) > len(set(hits)), "no expert was read twice"


LINKS = [
    pytest.param("T-QW2", "EP2DP1", "float32", id="EP2"),
    pytest.param("T-DS3", "EP4DP1[domains=2+2]", "bfloat16", id="domains", marks=[needs_native, pytest.mark.slow]),
]


@pytest.mark.parametrize(("name", "topology", "dtype"), LINKS)
def test_fp8_rows_in_two_halves(name: str, topology: str, dtype: str) -> None:
    setup = Setup(
        topology=topology, dtype=dtype, exchange_payload="fp8", overlap="on", max_chunk_tokens=7, keep_logits=False,
    )  # fmt: skip
    watched = check(checkpoint(name), setup)
    hits = [watched.hit(rank, 0) for rank in range(watched.group.num_ranks)]
    assert any((layer, 1 - half, slot) in hit for hit in hits for layer, half, slot in hit), "halves share no expert"


@needs_native
@pytest.mark.spawn
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["EP2DP1", HALVES])
def test_processes_over_shared_memory(topology: str) -> None:
    """Whole layers with the exchange in one native call, and divided heads, in the processes of a real engine."""
    path, setup = checkpoint("T-QW2"), Setup(topology=topology, dtype="bfloat16", keep_logits=False)
    config = setup.engine_config(path)
    model = replace(config.model, skip_tokenizer_init=True, max_model_len=512)
    config = replace(config, model=model, parallel=replace(config.parallel, ranks="processes"))
    replicas = ReplicaSet.start(config)
    try:
        replicas.wait_ready(120)
        for number, (prompt, answer) in enumerate(REQUESTS):
            params = SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True)
            replicas.submit(str(number), packed(random_prompt(prompt, seed=number)), params)
            finish(replicas, 1)
        deadline, steps, num_steps = time.monotonic() + 10, 0, -1
        while steps != num_steps:  # until the last counters are in
            assert time.monotonic() < deadline, (steps, num_steps)
            replicas.poll(0.2)
            (stats,) = replicas.stats()
            num_steps, counted = stats.num_steps, [decode_counters(rank) for rank in stats.ranks]
            steps = min(int(counters.steps.sum()) for counters in counted)
    finally:
        replicas.close()
    with Group(path, setup) as group:
        watched = Watched(group)
        for number, (prompt, answer) in enumerate(REQUESTS):
            group.submit(str(number), random_prompt(prompt, seed=number), greedy(answer))
            group.run()
        for rank, counters in enumerate(counted):
            expected, found = watched.bytes_of(rank), counted_bytes(counters)
            if group.atp > 1:
                assert sum(of_phase.pop("exchange") for of_phase in found.values()) > 0
            else:  # here all ranks read what each has chosen: four bytes a choice
                stayed, sent, far = watched.sent_by(rank)
                for phase, ran in zip(watched.phases(), watched.steps[rank], strict=True):
                    choices = 4 * sum(len(experts) for tokens in ran.choices.values() for experts in tokens)
                    expected[phase]["exchange"] += choices
                    sent += choices
                assert counters.exchange_bytes.tolist() == [stayed, sent, far]
                assert 0 < counters.waited_seconds == pytest.approx(counters.exchange_seconds[1])
            assert found == {phase: {name: expected[phase][name] for name in row} for phase, row in found.items()}
            assert counted_flops(counters) == watched.flops_of(rank)
            assert 0 < counters.host_seconds.sum() < counters.busy_seconds.sum()
        assert sum(counters.starved_seconds.sum() for counters in counted) > 0
