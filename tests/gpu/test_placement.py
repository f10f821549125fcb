"""The whole life of a rank on a GPU that is not there: weights, KV, warm-up, graphs and requests with all they can ask.

Every tensor lies where the operation that takes it needs it, captured steps do nothing that a capture does not survive,
and no request makes a kernel compile. Numbers are proven elsewhere (test_wired.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec, patch

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist

from moewe.attention.tensor_parallel import HeadShare
from moewe.models.families import load_config
from moewe.models.kernels.norm import norm_launch
from moewe.moe.wide_ep.exchanges import Exchange, LocalExchange, join_all_over_links
from moewe.moe.wide_ep.exchanges.links import Pending
from moewe.moe.wide_ep.exchanges.process_links import process_links
from moewe.moe.wide_ep.exchanges.registered_room import RegisteringBackend
from moewe.moe.wide_ep.exchanges.rehearsed_link import RehearsedLink
from moewe.runtime.config import GraphOptions
from moewe.runtime.graphs.choosing import why_eager
from moewe.runtime.graphs.device import CudaGraphs
from moewe.runtime.graphs.ladder import token_classes
from moewe.runtime.messages import PrepareMoves
from moewe.runtime.options import layout_config
from moewe.runtime.params import SamplingParams
from moewe.runtime.placements import expert_placement
from moewe.runtime.plan import RankPlan, StepHeader, pack, result_of_ranks
from moewe.runtime.processes.launch import WorkerStart
from moewe.runtime.rank_parts import build_worker, group_shape
from moewe.runtime.resolve import resolve
from moewe.runtime.scheduler import Request, Scheduler
from moewe.runtime.worker import Worker
from moewe.telemetry import ProgressBoard
from moewe.topologies.exchange_choice import exchanges_to_join
from moewe.topologies.link_probes import ANYWHERE, LAYERS, LinkProbe
from moewe.topologies.overlap_choice import HALVES, NOTHING, SHARED
from tests.gpu.test_wired import OTHERS, SMALLER
from tests.support.fake_gpu import DEVICE, MEMORY_BYTES, FakeGpuError, fake_gpu
from tests.support.fixtures import checkpoint, random_prompt
from tests.support.harness import Inline
from tests.support.quantised import fp8_checkpoint, mxfp4_checkpoint
from tests.support.setups import Setup

pytestmark = pytest.mark.slow  # torch's fakes take seconds to import
SETUP = Setup(
    device="cuda", dtype="bfloat16", num_blocks=64, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=128
)
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
# A prompt of two chunks and chance; every edit of logits; log-probabilities of both kinds.
REQUESTS = [
    (70, SamplingParams(max_tokens=6, top_p=0.9, top_k=5, min_p=0.01, ignore_eos=True)),
    (3, SamplingParams(max_tokens=4, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2,
                       logit_bias={3: 1.0}, bad_word_tokens=((1, 2), (5,)), ignore_eos=True)),
    (20, SamplingParams(max_tokens=9, temperature=0.0, logprobs=3, prompt_logprobs=2, ignore_eos=True)),
    (1, GREEDY),
]  # fmt: skip


MANY = 80  # sequences: more than one program routes


class Echo:
    """`Link` of two ranks that brings zeros from the other one."""

    size, held_bytes = 2, 0

    def __init__(self, index: int) -> None:
        self.index = index

    def start(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], *, evenly: bool = False
    ) -> Pending:
        assert len(rows) == sum(sent)
        return lambda: rows.new_zeros(sum(received), rows.shape[1])

    def gather(self, rows: torch.Tensor) -> Pending:
        return lambda: rows.new_zeros(self.size * len(rows), rows.shape[1])


class EchoHeads:
    """`TensorParallelGroup` whose other ranks have zeros."""

    def __init__(self, share: HeadShare) -> None:
        self.share = share

    def gather(self, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
        assert len(rows) == self.share.num_own(num_rows)
        return rows.new_zeros(num_rows, *rows.shape[1:])

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        return self.share.own_rows(partial).clone()

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        return values * 1.0

    def first(self, values: torch.Tensor) -> torch.Tensor:
        return values * 1

    def bytes_sent(self) -> int:
        return 0


class Ranks:
    """A group on one GPU that is not there, one rank after the other, and its scheduler."""

    def __init__(self, path: Path, setup: Setup) -> None:
        config, model, rule = setup.engine_config(path), load_config(path), setup.exchange_rule()
        eager = why_eager(config, rule.grid.topology, rule.name("decode", 1)) is not None  # as starting it settles
        config = msgspec.structs.replace(config, graphs=msgspec.structs.replace(config.graphs, enforce_eager=eager))
        placement, self.atp = expert_placement(config, model), rule.grid.topology.atp
        names, shape = exchanges_to_join(rule.grid, rule.facts), group_shape(config, placement)

        def exchange(rank: int) -> Exchange:
            if shape.num_ranks == 1:
                return LocalExchange(placement.num_slots)
            return join_all_over_links(names, shape, rank, lambda ranks: RehearsedLink(Echo(rank)))

        self.workers = [
            Worker(
                config, rank=rank, num_ranks=shape.num_ranks, exchange=exchange(rank), placement=placement,
                progress=ProgressBoard(shape.num_ranks).rank(rank), on_loading=lambda *_, **__: None,
                ranks=EchoHeads(HeadShare(rank % self.atp, self.atp)) if self.atp > 1 else None,
            )
            for rank in range(shape.num_ranks)
        ]  # fmt: skip
        self.loaded = [worker.load() for worker in self.workers]
        for worker in self.workers:
            worker.allocate(setup.num_blocks)
        self.allocated = [worker.warm_up() for worker in self.workers]
        self.scheduler = Scheduler(setup.scheduler_config(model))

    def run(
        self, requests: Sequence[tuple[int, SamplingParams]], on_step: Callable[[str], None] = lambda kind: None
    ) -> int:
        """Run requests, each with the length of its prompt, to their end; return how many tokens came."""
        for i, (length, params) in enumerate(requests):
            prompt = np.asarray(random_prompt(length, seed=length), np.int32)
            self.scheduler.add(Request(f"request-{i}", prompt, params, seed=i, arrival=float(i)))
        num_tokens = 0
        while (plan := self.scheduler.schedule()) is not None:
            own = plan.of_ranks(self.atp)
            results = [worker.run(plan.header, each) for worker, each in zip(self.workers, own, strict=True)]
            on_step(plan.header.kind)
            for update in self.scheduler.apply(result_of_ranks(plan.header.step, results, self.atp)):
                assert update.error is None, update
                num_tokens += len(update.token_ids)
        return num_tokens


def graphs_of(ranks: Ranks) -> int:
    """Return how many graphs all ranks are to hold."""
    held = [worker._forward.graphs for worker in ranks.workers]
    return sum(len(graphs.ladder.shapes) for graphs in held if graphs is not None)


CASES: dict[str, tuple[Callable[[], Path], Setup]] = {
    "sinks and windows": (lambda: checkpoint("T-GOS", **SMALLER["T-GOS"]), SETUP),
    "enforce-eager": (
        lambda: checkpoint("T-GOS", **SMALLER["T-GOS"]), replace(SETUP, graphs=GraphOptions(enforce_eager=True))
    ),
    "latents, groups and dense layers": (lambda: checkpoint("T-DS3", **SMALLER["T-DS3"]), SETUP),
    "long frequencies": (lambda: checkpoint("T-PHI", **OTHERS["T-PHI"]), SETUP),
    "mxfp4": (
        lambda: mxfp4_checkpoint("T-GOS", num_hidden_layers=2, layer_types=["full_attention"] * 2)[0],
        replace(SETUP, kv_cache_dtype="fp8"),
    ),
    "fp8 and batch-invariant": (
        lambda: fp8_checkpoint("T-DS3", (16, 32), num_hidden_layers=2)[0],
        replace(SETUP, batch_invariant=True, kv_cache_dtype="int8"),
    ),
    "without experts": (lambda: checkpoint("T-LLA"), SETUP),
    "fp8 that no kernel reads": (lambda: fp8_checkpoint("T-DS3", (48, 40), num_hidden_layers=2)[0], SETUP),
    "torch alone": (
        lambda: checkpoint("T-DS3", **SMALLER["T-DS3"]), replace(SETUP, kernels="torch", kv_cache_dtype="fp8")
    ),
    "two ranks, padded": (lambda: checkpoint("T-MIX", **SMALLER["T-MIX"]), replace(SETUP, topology="EP2DP1")),
    "two ranks, padded, enforce-eager": (
        lambda: checkpoint("T-MIX", **SMALLER["T-MIX"]),
        replace(SETUP, topology="EP2DP1", exchange="padded", graphs=GraphOptions(enforce_eager=True)),
    ),
    "two ranks, all to all": (
        lambda: checkpoint("T-MIX", **SMALLER["T-MIX"]),
        replace(SETUP, topology="EP2DP1[red=2]", exchange="all_to_all"),
    ),
    "divided heads": (
        lambda: checkpoint("T-FLX", num_hidden_layers=1),
        replace(SETUP, topology="EP2DP1[adp=1,atp=2]", exchange="all_to_all"),
    ),
}  # fmt: skip
# Where no graphs are, most for shapes that follow from numbers which the host has to look at.
UNCAPTURED = (
    "enforce-eager", "two ranks, padded, enforce-eager", "fp8 that no kernel reads", "torch alone",
    "two ranks, all to all", "divided heads",
)  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_lies_where_it_is_used(name: str) -> None:
    make, setup = CASES[name]
    path = make()
    with fake_gpu() as gpu:
        ranks = Ranks(path, setup)
        assert all(found.isa == "" and found.gpu is not None for found in ranks.allocated), "no CPU has to do with it"
        assert len(gpu.captured) == graphs_of(ranks) and bool(gpu.captured) == (name not in UNCAPTURED)
        for start, stop in gpu.captured:
            eager = gpu.launches[2 * start - stop : start]
            assert gpu.launches[start:stop] == eager, "a capture launches what the step before it did"
        compiled, num_launches = set(gpu.launches), len(gpu.launches)
        assert ranks.run(REQUESTS) == 25
        assert not set(gpu.launches[num_launches:]) - compiled, "a request waits for a compiler"


@pytest.mark.parametrize("graphs", [{"enforce_eager": True}, {"cuda_graph_max_bs": 2}], ids=["eager", "up to 2 rows"])
def test_prompts_of_a_token_and_decodes_of_any_number_of_rows_find_their_kernels(graphs: dict[str, Any]) -> None:
    limits = {"num_blocks": MANY, "max_num_seqs": MANY, "max_num_batched_tokens": MANY}
    setup, short = (
        replace(SETUP, **limits, graphs=GraphOptions(**graphs)),
        msgspec.structs.replace(GREEDY, max_tokens=3),
    )
    path = checkpoint("T-GOS", **SMALLER["T-GOS"])
    with fake_gpu() as gpu:
        ranks = Ranks(path, setup)
        compiled = set(gpu.launches)
        for num_rows in (1, 2, 3, 16, 17, MANY // 2, MANY):
            assert ranks.run([(1, short)] * num_rows) == 3 * num_rows
            assert not set(gpu.launches) - compiled, f"{num_rows} rows wait for a compiler"


def test_a_gpu_that_is_too_old_for_kernels_runs_none() -> None:
    """Rows of logits included: torch chooses tokens there."""
    path = checkpoint("T-MIX", **SMALLER["T-MIX"])
    with fake_gpu((7, 5)) as gpu:
        ranks = Ranks(path, replace(SETUP, dtype="float16"))
        assert ranks.loaded[0].kernels == (
            "torch runs all of it: the GPU has compute capability 7.5, kernels need 8.0",
        )
        assert ranks.run(REQUESTS) == 25 and not gpu.launches


def test_what_a_gpu_would_refuse_is_refused() -> None:
    here = torch.ones(2, 4)
    with fake_gpu() as gpu:
        there = here.to(DEVICE)
        norm_launch(there, there[0], eps=0.0, added=None, multiplier=1.0, out=there * 2).run()
        with pytest.raises(FakeGpuError, match="weight on cpu"):
            norm_launch(there, here[0], eps=0.0, added=None, multiplier=1.0, out=there * 2).run()
        with pytest.raises(RuntimeError, match="device"):
            there + here
        gpu.begin_capture(gpu.new_pool())
        for look in (
            lambda: there.sum().item(), lambda: there[there > 0], lambda: there.cpu(), lambda: here.to(DEVICE),
            lambda: there[torch.zeros(1, dtype=torch.int64)], lambda: torch.zeros(2, pin_memory=True),
            lambda: here.copy_(there),
        ):  # fmt: skip
            with pytest.raises(FakeGpuError, match="while a graph is captured"):
                look()


@pytest.mark.parametrize("by_driver", [True, False], ids=["at its end", "within it and at its end"])
def test_a_capture_that_is_spoilt_spoils_no_other(by_driver: bool) -> None:
    """The driver gives the second one up, of which torch's allocator is not told."""

    def fail() -> None:
        raise RuntimeError("out of something")

    with fake_gpu() as gpu:
        graphs, gpu.spoilt = CudaGraphs(DEVICE), {1}
        graphs.capture(lambda: None)
        with pytest.raises(RuntimeError, match="previous error" if by_driver else "out of something"):
            graphs.capture((lambda: None) if by_driver else fail)
        assert not gpu.recording and gpu.released == [(0, 1)], "the allocator knows that nothing is captured"
        for _ in range(2):
            graphs.capture(lambda: None)
        assert len(gpu.captured) == 3 and not gpu.recording and len(gpu.released) == 1
        with pytest.raises(RuntimeError, match="out of something"):  # and this one torch ends by itself
            graphs.capture(fail)
        assert not gpu.recording and len(gpu.released) == 1


def test_what_a_start_settles_is_what_a_rank_can_run() -> None:
    """`serve --device cuda` without its processes: options resolved, the rank built, KV sized by what is free."""
    asked = layout_config({"model": "any", "device": "cuda", "max_num_seqs": 4})
    model = msgspec.structs.replace(asked.model, path=str(checkpoint("T-MIX", **SMALLER["T-MIX"])))
    with fake_gpu() as gpu:
        with patch.object(torch.cuda, "is_available", lambda: True), patch.object(torch.version, "cuda", "13.0"):
            found = resolve(msgspec.structs.replace(asked, model=model))
        assert found.config.graphs.graph_rows == (1, 2, 4) and found.budget.rank_memory_bytes < MEMORY_BYTES
        start = WorkerStart(config=found.config, rank=0, num_ranks=1, run_directory="", device_index=DEVICE.index)
        worker = build_worker(start, ProgressBoard(1).rank(0), lambda *_, **__: None, None)
        loaded = worker.load()
        worker.allocate(loaded.num_blocks)
        (held,) = worker.warm_up().kv_bytes.values()
        assert 0 < held < MEMORY_BYTES // 2
        assert len(gpu.captured) == 3 * len(token_classes(found.config.model.max_model_len))
        for step in (0, 1):  # nobody asks for anything: an idle rank takes part
            header = StepHeader(step=step, epoch=0, kind="idle", bucket=0, exchange="local")
            assert worker.run(header, RankPlan()).num_rows == 0


def test_probes_and_moves_of_experts() -> None:
    path = checkpoint("T-MIX", **SMALLER["T-MIX"])
    with fake_gpu():
        ranks = Ranks(path, replace(SETUP, topology="EP2DP1", eplb="auto"))
        swapped = np.array([4, 1, 2, 3, 0, 5, 6, 7])  # slots of experts, of which each rank has four
        for rank, worker in enumerate(ranks.workers):
            for probe in (
                LinkProbe(exchange="padded", rows=4, what=ANYWHERE, repeats=2),
                LinkProbe(exchange="all_to_all", rows=9, what=LAYERS, repeats=2, overlaps=(NOTHING, SHARED, HALVES)),
            ):
                assert all(len(times) == 2 for times in worker.probe(probe).seconds.values())
            moves = worker.moves
            assert moves is not None
            moves._thread = Inline()  # type: ignore[assignment]
            moves.obey(
                PrepareMoves(placement=1, moves=pack(np.array([0, 0, 4 - 4 * rank])), layers=(0,), tables=pack(swapped))
            )
            report = moves.take_report()
            assert report is not None and not report.error, report
            with torch.inference_mode():
                moves.switch(1)


def test_links_of_processes_ask_torch_for_what_it_has() -> None:
    """NCCL's collectives, communicator and memory by their real signatures, on the rank's own GPU."""
    backend = create_autospec(RegisteringBackend, instance=True)
    group = create_autospec(dist.ProcessGroup, instance=True)
    group.size.return_value, group._get_backend.return_value = 2, backend
    asked = {name: create_autospec(getattr(dist, name)) for name in ("all_reduce", "all_gather_into_tensor")}
    asked |= {"get_world_size": create_autospec(dist.get_world_size, return_value=2)}
    asked |= {"get_rank": create_autospec(dist.get_rank, return_value=1)}
    pools = {name: create_autospec(getattr(torch.cuda, name)) for name in ("MemPool", "use_mem_pool")}
    with fake_gpu(), patch.multiple(dist, **asked), patch.multiple(torch.cuda, **pools), patch.dict(os.environ):
        link = process_links({(0, 1): group}, ["all_to_all", "padded"], "cuda")([0, 1])
        group._get_backend.assert_called_once_with(DEVICE)
        asked["all_gather_into_tensor"].return_value.wait.return_value = True
        arrived = link.gather(torch.zeros(3, 8, dtype=torch.uint8, device=DEVICE))()
    assert arrived.shape == (6, 8) and arrived.device == DEVICE
    assert asked["all_reduce"].call_count == 2, "a communicator is made, then ranks agree"
    assert backend.register_mem_pool.call_count == 3, "tried once, then a buffer for each end"
