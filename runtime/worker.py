"""One rank at work: it holds weights, KV and the running batch, and turns each plan into tokens.

Not a decision (the plan says what runs), not a transport (runtime/worker_main.py). Idle ranks run it with T = 0.
Shapes: T rows of this rank in the step, K of them sampled, S slots; logits [K, V] f32. Units: bytes, blocks, seconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ..attention.tensor_parallel import ALL_HEADS, TensorParallelGroup
from ..kvcache.storage import KVStorage
from ..models.decoder import Decoder
from ..models.families import load_config
from ..models.footprint import cache_groups, kv_groups
from ..models.forward_batch import ForwardBatch
from ..models.head_shares import local_config
from ..models.kernels.choice import kernel_report
from ..models.loading import load_weights
from ..models.weights import bytes_by_kind
from ..moe.probing import LinkProber
from ..moe.wide_ep.exchanges import Exchange
from ..moe.wide_ep.placement import ExpertPlacement
from ..native.library import native_isa
from ..quant import parse_format, parse_kv_format
from ..telemetry import RankCounters, RankProgress, StepClock
from ..telemetry.step_marks import HEAD, SAMPLING, WAIT
from ..topologies.link_probes import LinkProbe, RankFound
from .config import EngineConfig
from .counter_reports import CounterReports
from .graphs.capture import StepTensors
from .graphs.forward import StepForward
from .graphs.starting import OnProgress, WarmStart
from .kv_layout import kv_layout, step_limits
from .messages import KVAllocated, Loaded
from .plan import (
    FINISH_ERROR,
    PromptLogprobs,
    RankPlan,
    RankResult,
    StepHeader,
    TokenLogprobs,
    pack,
)
from .ranges import moves_experts
from .rank_stats import Gpu
from .ranks.batch import StepRows, WorkerBatch
from .ranks.choice import Choice, agree, healthy_slots
from .ranks.finish import Committed, Outcome
from .ranks.held_memory import HeldMemory
from .ranks.loading import attends_natively, device_of, kernels_of, load_options
from .ranks.logit_edits import LogitEdits, edited
from .ranks.memory import blocks_that_fit, gpu_counters, matrix_rates, read_bandwidth, resident_on
from .ranks.metered import metered
from .ranks.reports import chosen_logprobs, prompt_logprobs
from .ranks.routing_log import RoutingLog
from .ranks.row_scan import StepScanner
from .ranks.sampler import sample
from .ranks.step_inputs import InputBuilder, StepInputs
from .ranks.step_way import begin_step
from .ranks.warm_up import FIRST_STEP, warm_up_plans, warm_up_shapes
from .rebalancing.rank_moves import RankMoves

# Sees every step: what ran, the final hidden states [T, D], and whose row each is, sequence ids [T] i64.
Observer = Callable[[ForwardBatch, torch.Tensor, np.ndarray], None]


class Worker:
    """One rank of an expert-parallel group. `load`, `allocate`, `warm_up`, then `run` for every step.

    Args:
        config: resolved.
        rank, num_ranks: position in the group.
        exchange: joins the ranks.
        placement: of experts on ranks.
        progress: signs of life.
        on_loading: told (bytes done, bytes in all) while weights load, then of graphs that are captured.
        ranks: that divide the heads of attention with this one; None where it has them all.

    Attributes:
        counters: everything that this rank counts.
        observer: a test's eyes, called after every forward pass.
        routing_log: keeps what routers choose, if set before `load`.
        moves: of experts while serving; None where they stay, and before `load`.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        rank: int,
        num_ranks: int,
        exchange: Exchange,
        placement: ExpertPlacement,
        progress: RankProgress,
        on_loading: OnProgress,
        ranks: TensorParallelGroup | None = None,
    ) -> None:
        self.config, self.rank, self.num_ranks = config, rank, num_ranks
        self.model_config = load_config(Path(config.model.path))
        self._ranks, self._share = metered(ranks, config, rank), ALL_HEADS if ranks is None else ranks.share
        self._own_config = local_config(self.model_config, self._share)
        self.number_format = parse_format(config.model.dtype_for(self.model_config.dtype))
        self.kv_format = parse_kv_format(config.cache.kv_cache_dtype, self.number_format)
        self.device = device_of(config)
        self._kernels = kernels_of(config, self._own_config, self.device)
        self._counters = RankCounters(len(self.model_config.moe_layers), placement.num_local_slots(rank))
        self._clock = StepClock(self._counters)
        self._reports = CounterReports(self._counters)
        self.observer: Observer | None = None
        self.routing_log: RoutingLog | None = None
        self.moves: RankMoves | None = None
        self._prober: LinkProber | None = None
        # Sequences that may grow beyond this length use other rotary frequencies from their first token on.
        scaling = self.model_config.rotary.scaling
        self._long_from = scaling.original_max_position if scaling is not None and scaling.kind == "longrope" else 0
        self._exchange, self._placement = exchange, placement
        self._progress, self._on_loading = progress, on_loading
        self._decoder: Decoder | None = None
        self._storage: KVStorage | None = None
        self._batch: WorkerBatch | None = None
        self._scan = StepScanner(self.device)
        self._next_step = FIRST_STEP

    @property
    def decoder(self) -> Decoder:
        """The loaded model."""
        assert self._decoder is not None, "load first"
        return self._decoder

    @property
    def storage(self) -> KVStorage:
        """The KV of this rank."""
        assert self._storage is not None, "allocate first"
        return self._storage

    @property
    def batch(self) -> WorkerBatch:
        """The running batch."""
        assert self._batch is not None, "allocate first"
        return self._batch

    def load(self) -> Loaded:
        """Read this rank's weights and say how many KV blocks fit beside them."""
        path = Path(self.config.model.path)
        how = load_options(self.config, self.number_format, self._placement, self.rank, self._share)
        report = load_weights(path, self.model_config, how, on_progress=self._on_loading)
        self._weight_bytes = report.bytes_held
        self._decoder = Decoder(
            self._own_config,
            report.weights,
            placement=self._placement,
            rank=self.rank,
            exchange=self._exchange,
            counters=self._counters,
            ranks=self._ranks,
            kernels=self._kernels,
        )
        self._decoder.watch(self._progress)
        if self.routing_log is not None:
            self._decoder.observe_routing(self.routing_log.observe)
        if moves_experts(self.config):
            self.moves = RankMoves(self._decoder, path, self.model_config, how)
        return Loaded(
            rank=self.rank,
            num_blocks=blocks_that_fit(self.config, self._own_config, self.number_format, self.device),
            weight_bytes=report.bytes_held,
            weight_bytes_read=report.bytes_read,
            expert_slots=self._placement.num_local_slots(self.rank),
            weight_kinds=bytes_by_kind(report.weights),
            pid=os.getpid(),
            kernels=kernel_report(self._kernels, self._decoder.moe_layers),
        )

    def allocate(self, num_blocks: int) -> None:
        """Hold `num_blocks` KV blocks, and compile what steps need; groups of windows get fewer (`kv_layout`)."""
        config, model = self.config, self._own_config
        limits = step_limits(config, otherwise=model.max_position_embeddings)
        layout = kv_layout(kv_groups(model, dtype=self.kv_format), limits, num_blocks)
        self._storage = KVStorage(
            cache_groups(model, dtype=self.kv_format),
            num_blocks=layout.num_blocks,
            block_size=config.cache.block_size,
            device=self.device,
        )
        self._batch = WorkerBatch(
            num_slots=config.schedule.max_num_seqs,
            max_model_len=layout.max_model_len,
            block_size=config.cache.block_size,
            groups=[(group.kind, group.window) for group in layout.groups],
        )
        self._inputs = InputBuilder(
            self._batch,
            self.device,
            self._long_from,
            native=attends_natively(config, self.number_format, self.device),
            gpu=self._kernels.attention is not None,
            divides_heads=self._ranks is not None,
        )
        self._reports.held = HeldMemory(
            self._weight_bytes, self._storage, self._batch, self._exchange, self._ranks,
            resident=partial(resident_on, self.device),
        )  # fmt: skip
        self._forward = StepForward(self.decoder, self._storage, self._inputs)
        self._start = WarmStart(
            config, self._forward, self._exchange, self._run_made_up, max_model_len=layout.max_model_len,
            on_progress=self._on_loading, tells=self.rank == 0,
        )  # fmt: skip
        self._start.compile()

    def warm_up(self) -> KVAllocated:
        """Run steps on a made-up sequence, capture those of decode, and measure what the machine can do.

        All ranks do it and end the steps at once, so they measure together.
        """
        assert self._reports.held is not None, "allocate first"
        self._reports.held.graph_bytes = self._start.warm_up()
        measured = read_bandwidth(self.device, self.num_ranks, self._weight_bytes)
        rates = matrix_rates(self.device, self.num_ranks)
        gpu = self._reports.gpu = gpu_counters(self.device)  # from here on: no loading and no measuring is in it
        return KVAllocated(
            rank=self.rank,
            memory_bandwidth=measured.bytes_per_second,
            cache_resident=measured.cache_resident,
            matrix_rates=rates,
            isa=(native_isa() or "") if rates and self.device.type == "cpu" else "",
            kv_bytes=self.storage.bytes_by_format(),
            gpu=None if gpu is None else Gpu(uuid=gpu.uuid, peak_bytes_per_second=gpu.peak_bytes_per_second),
        )

    def probe(self, probe: LinkProbe) -> RankFound:
        """Time an exchange or MoE layers, with all ranks of the group; after `warm_up` and before any request."""
        if self._prober is None:
            width, dtype = self.model_config.hidden_size, self.number_format.torch_dtype
            rows = torch.empty(0, width, dtype=dtype, device=self.device)
            self._prober = LinkProber(self.decoder.moe_layers, self._exchange, self._placement, self.rank, rows)
        found = self._prober.run(probe)
        self._reports.forget_gpu()  # no step moved that
        return found

    @torch.inference_mode()
    def run(self, header: StepHeader, plan: RankPlan, before_layers: Callable[[], None] | None = None) -> RankResult:
        """Run one step. A collective: every rank calls it for every step, with or without rows of its own.

        Args:
            header: of the step.
            plan: of this rank.
            before_layers: called once, when everything is ready for the layers, or a graph of them was launched.

        Raises:
            RuntimeError: the engine and this rank disagree about what the step is.
        """
        self._clock.begin(traced=header.traced)
        self._check_header(header, self._forward.begin(header))
        if self.moves is not None:
            self.moves.switch(header.placement)
        self.batch.apply(plan, snapshot=header.snapshot)
        rows = self.batch.rows(plan.chunks, plan.held)
        if rows.decode_slots.size > plan.num_decodes:
            raise RuntimeError(
                f"step {header.step}: {rows.decode_slots.size} sequences decode on rank {self.rank}, "
                f"but the plan counts {plan.num_decodes}"
            )
        num_rows = self._share.num_own(rows.num_rows)
        self._counters.begin_step(header.kind, num_rows)
        inputs = self._inputs.of(rows)
        self._clock.inputs_ready()
        made = self._clock.marks
        hidden, replayed = self._forward(header, inputs, before_layers, made)
        self._progress.tick()  # others may wait for this rank to get so far, and a graph gives no sign of life
        self._clock.computed()
        if self.observer is not None:
            self.observer(inputs.forward, hidden, self.batch.sequence_ids[rows.row_slots])
        if self.routing_log is not None:
            self.routing_log.end_step(inputs.rows.decode_slots.size, keep=header.step >= 0)
        choice = self._choose(plan, inputs, hidden, replayed) if self._share.is_first else None
        if self._ranks is not None:
            choice = agree(self._ranks, rows, choice, num_slots=self.batch.num_slots, device=self.device)
            self._clock.mark(WAIT)
        assert choice is not None
        chosen, healthy = choice.tokens, choice.healthy
        all_well = bool(healthy.all())
        kept = self.batch.commit(rows, chosen, None if all_well else healthy)
        outcome = self._outcome(rows, chosen, kept, None if all_well else healthy)
        if self._ranks is not None:
            self._counters.add_exchange(*self._ranks.take())
        none_ended = not outcome.flags.any()
        goes_on = (none_ended and bool(rows.sample_slots.size)) or bool(self.batch.num_running)
        busy = self._clock.end(goes_on=goes_on)
        counters = self._reports.after_step(goes_on=goes_on, at_once=header.counts)
        marks = made.packed() if made is not None else b""
        if not self._share.is_first:  # the first of the attention replica tells what became of its sequences
            return RankResult(step=header.step, num_rows=num_rows, busy_seconds=busy, counters=counters, marks=marks)
        return RankResult(
            step=header.step,
            slots=inputs.slots if all_well else pack(outcome.slots),
            sequence_ids=inputs.sequence_ids if all_well else pack(self.batch.sequence_ids[outcome.slots], "<i8"),
            tokens=pack(outcome.tokens),
            flags=b"" if none_ended else pack(outcome.flags, "u1"),
            counts=b"" if (outcome.counts == 1).all() else pack(outcome.counts),
            logprobs=choice.logprobs,
            prompt_logprobs=choice.prompt_logprobs,
            num_rows=num_rows,
            busy_seconds=busy,
            counters=counters,
            marks=marks,
        )

    def _choose(self, plan: RankPlan, inputs: StepInputs, hidden: torch.Tensor, replayed: StepTensors | None) -> Choice:
        """Judge the rows of a step by their final `hidden` [T, D] and choose the next token of those that sample."""
        rows, send = inputs.rows, self._inputs.send
        if replayed is None:
            logits = self.decoder.step_logits(hidden if inputs.samples_all else hidden[inputs.forward.sample_rows])
            self._clock.computed()
            self._clock.mark(HEAD)
            tokens, *judged = self._scan.look(logits, hidden)
        else:
            logits, tokens, judged = replayed.logits, replayed.best, [replayed.finite, replayed.well]
        if not inputs.takes_best or plan.masks:
            scores = self._scores(plan, rows, logits)
            best = tokens.clone() if scores is logits else None
            tokens = sample(scores, self._inputs.settings(rows), best, send)
        chosen, finite, well = self._scan.fetch(tokens, *judged)
        if replayed is not None or self.device.type != "cpu":
            self._clock.computed()  # the device has finished
        healthy = healthy_slots(rows, self.batch.num_slots, finite, well)
        logprobs: tuple[TokenLogprobs, ...] = ()
        on_prompts: tuple[PromptLogprobs, ...] = ()
        if rows.segments:
            on_prompts = prompt_logprobs(self.batch, rows, hidden, self.decoder.logits, healthy, send)
        if not inputs.takes_best:
            logprobs = chosen_logprobs(self.batch, rows, logits, chosen, healthy, send)
        self._clock.mark(SAMPLING)
        return Choice(tokens=chosen, healthy=healthy, logprobs=logprobs, prompt_logprobs=on_prompts)

    @property
    def counters(self) -> RankCounters:
        """Of this rank, for its own thread."""
        self._counters.settle()
        return self._counters

    def late_counters(self) -> bytes:
        """Return the counters when some of them have not gone out with a result; else nothing."""
        return self._reports.late()

    def _check_header(self, header: StepHeader, num_rows: int | None) -> None:
        begin_step(self._exchange, header, self.rank, num_rows)
        if header.step != self._next_step and not header.snapshot:
            raise RuntimeError(f"step {header.step} came to rank {self.rank}, but step {self._next_step} is next")
        self._next_step = header.step + 1

    def _scores(self, plan: RankPlan, rows: StepRows, logits: torch.Tensor) -> torch.Tensor:
        """Return what tokens are chosen from: `logits` as the sequences and the plan's masks change them."""
        edits = self.batch.logit_edits(rows.sample_slots)
        if plan.masks:
            edits = edits or LogitEdits()
            edits.add_masks(plan.masks, rows.sample_slots, logits.shape[1])
        return logits if edits is None else edited(logits, edits, self._inputs.send)

    def _outcome(self, rows: StepRows, tokens: np.ndarray, kept: Committed, healthy: np.ndarray | None) -> Outcome:
        """Return what to report, with those that ended unhealthy before they were sampled; their KV is zeroed."""
        slots, counts, flags = rows.sample_slots, kept.counts, kept.flags
        if healthy is not None:
            ill = np.flatnonzero(~healthy)
            # Masked positions are multiplied by zero, and zero times NaN is NaN: the next owner would suffer.
            for slot in ill.tolist():
                for group in range(len(self.batch.groups)):
                    self.storage.zero_blocks(torch.from_numpy(self.batch.blocks_of(slot, group)), group)
            silent = np.setdiff1d(ill, slots)  # within their prompt
            slots = np.concatenate([slots, silent])
            counts = np.concatenate([counts, np.zeros_like(silent)])
            flags = np.concatenate([flags, np.full(silent.size, FINISH_ERROR, np.uint8)])
        return Outcome(slots=slots, tokens=tokens[kept.counts > 0], counts=counts, flags=flags)

    def _run_made_up(self) -> None:
        size, rows = self.config.cache.block_size, self.config.schedule.max_num_batched_tokens
        most, decodes = min(rows, self.batch.max_blocks * size - 2), min(rows, self.batch.num_slots)
        compiles = self.device.type == "cuda" and self._kernels.rows is not None
        for name, *shape in warm_up_shapes(self._exchange, size, most, decodes, compiles=compiles):
            steps, used = warm_up_plans(name, size, self.storage.num_blocks, *shape)
            self._next_step = FIRST_STEP
            for header, plan in steps:
                self.run(header, plan)
            self.batch.apply(RankPlan(), snapshot=True)
            for group, blocks in enumerate(used):
                self.storage.zero_blocks(range(blocks), group)
        self._counters.clear()
        self._clock = StepClock(self._counters)  # so that waiting for the first request is not waiting for a plan
        self._reports.forget()
