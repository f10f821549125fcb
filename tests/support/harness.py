"""The invariance harness: real scheduler and real workers (ranks as threads) in this process, watched at every step.

Not a server and not an engine: it drives schedule / run / apply itself, at depth two, so that tests see every row.
Shapes: logits are [V] f32 a position; position p is the row that reads token p and predicts token p + 1.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moewe.models.families import load_config
from moewe.moe.wide_ep.balancing import Decision, LayerModel, Planner, logical_load
from moewe.moe.wide_ep.balancing.load_steps import LEAST_TOKENS
from moewe.moe.wide_ep.exchanges import Exchange, LocalExchange, ThreadHub, join_all_over_links
from moewe.moe.wide_ep.placement import ExpertPlacement
from moewe.runtime.attention_ranks import GroupHub
from moewe.runtime.messages import DropMoves, Message, PrepareMoves
from moewe.runtime.params import SamplingParams
from moewe.runtime.placements import expert_placement
from moewe.runtime.plan import PromptLogprobs, StepPlan, TokenLogprobs, result_of_ranks
from moewe.runtime.rank_parts import group_shape
from moewe.runtime.rebalancing.balancer import Balancer
from moewe.runtime.scheduler import Request, Scheduler, SequenceUpdate
from moewe.runtime.worker import Worker
from moewe.telemetry import ProgressBoard
from moewe.topologies import parse_topology
from moewe.topologies.exchange_choice import exchanges_to_join
from tests.support.layer_models import Idle
from tests.support.rank_threads import GroupMemory, RankThread, results_of
from tests.support.setups import Setup


class Inline(Executor):
    """Runs what is submitted at once."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@dataclass(kw_only=True)
class Outcome:
    """What became of one request.

    Attributes:
        logits: by position; a position that ran twice (after preemption) keeps the last.
        drift: largest difference between two runs of one position.
    """

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    num_preemptions: int = 0
    logits: dict[int, torch.Tensor] = field(default_factory=dict)
    drift: float = 0.0

    def logits_of_all(self) -> torch.Tensor:
        """Return the logits of every position that ran, [len(prompt) + len(tokens) - 1, V]."""
        return torch.stack([self.logits[i] for i in range(len(self.prompt) + len(self.tokens) - 1)])


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step of one group, an entry a rank: rows run, and rows that reached its experts in each MoE layer."""

    kind: str
    exchange: str
    overlap: str
    rows: tuple[int, ...]
    expert_rows: np.ndarray  # [W, L_moe]


class Group:
    """One expert-parallel group: a scheduler and its workers. Use as a context manager.

    Attributes:
        placement: of experts.
        outcomes: by request id.
        steps: a record of every step.
    """

    def __init__(
        self, checkpoint: Path, setup: Setup, *, layer_model: LayerModel | None = None, least_tokens: int = LEAST_TOKENS
    ) -> None:
        self.setup = setup
        topology = parse_topology(setup.topology)
        self.model = load_config(checkpoint)
        moe = self.model.moe
        self.top_k = moe.routing.top_k if moe else 0
        self.num_ranks = topology.ep
        config, rule = setup.engine_config(checkpoint), setup.exchange_rule()
        self.placement = placement = expert_placement(config, self.model)
        names = exchanges_to_join(rule.grid, rule.facts)
        shape = group_shape(config, placement)
        hub = GroupHub(shape, topology) if self.num_ranks > 1 else None
        self._memory = GroupMemory(setup, self.model, placement) if names == ("shm",) else None
        exchanges = [
            joined(names, hub, rank, setup, self._memory) if hub else LocalExchange(placement.num_slots)
            for rank in range(self.num_ranks)
        ]
        board = ProgressBoard(self.num_ranks)
        self.atp = topology.atp
        heads = [own.rank(share) for own in hub.attention for share in range(self.atp)] if hub else []
        self.ranks = [
            RankThread(
                Worker(
                    config,
                    rank=rank,
                    num_ranks=self.num_ranks,
                    exchange=exchange,
                    placement=placement,
                    progress=board.rank(rank),
                    on_loading=lambda *_, **__: None,
                    ranks=heads[rank] if heads else None,
                ),
                hub,
            )
            for rank, exchange in enumerate(exchanges)
        ]
        self.workers = [rank.worker for rank in self.ranks]
        self.loaded = self._all("load")
        self._all("allocate", setup.num_blocks)
        self.allocated = self._all("warm_up")
        for rank, worker in enumerate(self.workers):
            worker.observer = self._observer(rank)
        self.scheduler = Scheduler(setup.scheduler_config(self.model))
        self.outcomes: dict[str, Outcome] = {}
        self.steps: list[StepRecord] = []
        self._requests: dict[str, Request] = {}
        self._owner: dict[int, str] = {}  # sequence id -> request id
        self._in_flight: list[StepPlan] = []
        self._expert_rows = np.zeros((self.num_ranks, len(self.model.moe_layers)), np.int64)
        self.balancer: Balancer | None = None
        if setup.eplb == "auto":
            planner = Planner(start=placement, model=layer_model or Idle(placement.slot_ranges))
            self.balancer = Balancer(
                self, planner, top_k=self.top_k, expert_bytes=1, least_tokens=least_tokens, decider=Inline()
            )
        self._lock = threading.Lock()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.close()
        for worker in self.workers:
            if worker.moves is not None:
                worker.moves.close()
        if self._memory is not None:
            self._memory.close()

    def submit(self, request_id: str, prompt: Sequence[int], params: SamplingParams, *, seed: int = 0) -> Outcome:
        """Queue a request; its outcome fills up while steps run."""
        seed = params.seed if params.seed is not None else seed
        request = Request(
            request_id, np.asarray(prompt, np.int32), params, seed=seed, arrival=float(len(self.outcomes))
        )
        self.scheduler.add(request)
        self._requests[request_id] = request
        self.outcomes[request_id] = Outcome(prompt=list(prompt))
        return self.outcomes[request_id]

    def request(self, request_id: str) -> Request:
        """Return the scheduler's own record of a request."""
        return self._requests[request_id]

    def abort(self, request_id: str) -> bool:
        """Abort a request, with whatever is in flight."""
        if not self.scheduler.abort(request_id):
            return False
        self.outcomes[request_id].finish_reason = "abort"
        return True

    def step(self) -> bool:
        """Plan a step and, when enough are in flight or nothing can be planned, apply the oldest; False when idle."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self._submit(plan)
        if self._in_flight and (plan is None or len(self._in_flight) >= self.setup.depth):
            self._collect()
        self.scheduler.check_invariants()
        return self.scheduler.has_work or bool(self._in_flight)

    def run(self) -> dict[str, Outcome]:
        """Step until idle, check that the books balance, and return all outcomes."""
        while self.step():
            pass
        assert not any(self.scheduler.used_blocks_per_rank), "blocks leaked"
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        self.check_participation()
        return self.outcomes

    def snapshot(self) -> None:
        """Apply what is in flight, then run a step whose plan rebuilds every worker's batch from nothing."""
        while self._in_flight:
            self._collect()
        self._submit(self.scheduler.snapshot())

    def move(self, decision: Decision) -> None:
        """Have experts moved; it comes into force two steps after all ranks are ready for it."""
        assert self.balancer is not None, "eplb auto"
        self.balancer.begin(decision)

    @property
    def standing(self) -> ExpertPlacement:
        """Where experts are for the next step, if nothing is being moved; `placement` is where they began."""
        assert self.balancer is not None, "eplb auto"
        return self.balancer._collector._placement

    def hear(self, *, wait: bool = True) -> None:
        """Pass on what ranks have prepared; those that still do are waited for, unless told otherwise."""
        for worker in self.workers:
            assert worker.moves is not None and self.balancer is not None
            if wait:
                assert worker.moves.wait(60), "a rank prepares forever"
            if (report := worker.moves.take_report()) is not None:
                self.balancer.prepared(report)

    def send(self, rank: int, message: Message) -> None:
        """Let a rank obey the balancer, before the next step that is planned."""
        moves = self.workers[rank].moves
        assert moves is not None and isinstance(message, PrepareMoves | DropMoves)
        moves.obey(message)

    def check_participation(self) -> None:
        """Raise AssertionError unless every rank took part in every step."""
        counts = {tuple(worker.counters.steps.tolist()) for worker in self.workers}
        assert len(counts) == 1, f"ranks differ in steps by phase: {counts}"
        assert sum(counts.pop()) == len(self.steps)

    @property
    def num_preemptions(self) -> int:
        """Sequences that lost their slot so far."""
        return self.scheduler.num_preemptions

    def rows_per_expert(self) -> np.ndarray:
        """Return the rows that reached each expert in each MoE layer, [L_moe, E], replicas together; none has moved."""
        slots = np.concatenate([worker.counters.expert_tokens for worker in self.workers], axis=1)
        return logical_load(slots, self.placement.physical_to_logical, self.placement.num_experts)

    def _all(self, name: str, *args: Any) -> list[Any]:
        """Call a method of every worker at once; it may be a collective."""
        for rank in self.ranks:
            rank.call(name, *args)
        return results_of(self.ranks)

    def _submit(self, plan: StepPlan) -> None:
        if self.balancer is not None:
            plan = self.balancer.mark(plan)
        for request_id, request in self._requests.items():
            if request.sequence_id >= 0:
                self._owner[request.sequence_id] = request_id
        for rank, rank_plan in zip(self.ranks, plan.of_ranks(self.atp), strict=True):
            rank.call("run", plan.header, rank_plan)
        self._in_flight.append(plan)

    def _collect(self) -> None:
        plan = self._in_flight.pop(0)
        outcomes = results_of(self.ranks)
        results = tuple(result for result, _ in outcomes)
        if self.balancer is not None and all(result.counters for result in results):
            self.balancer.counted(plan.header.step, [result.counters for result in results])
        expert_rows = np.stack([rows for _, rows in outcomes])
        record = StepRecord(
            kind=plan.header.kind,
            exchange=plan.header.exchange,
            overlap=plan.header.overlap,
            rows=tuple(result.num_rows for result in results),
            expert_rows=expert_rows - self._expert_rows,
        )
        self._expert_rows = expert_rows
        self.steps.append(record)
        for result, rank_plan in zip(results, plan.of_ranks(self.atp), strict=True):
            assert result.num_rows <= rank_plan.num_rows <= plan.header.bucket
        assert (record.expert_rows.sum(0) == sum(record.rows) * self.top_k).all(), f"routed rows went astray: {record}"
        for update in self.scheduler.apply(result_of_ranks(plan.header.step, results, self.atp)):
            self._book(update)

    def _book(self, update: SequenceUpdate) -> None:
        outcome = self.outcomes[update.request.request_id]
        outcome.tokens += update.token_ids
        outcome.logprobs += update.logprobs
        outcome.prompt_logprobs += update.prompt_logprobs
        outcome.finish_reason, outcome.error = update.finish_reason, update.error
        outcome.num_preemptions = update.request.num_preemptions

    def _observer(self, rank: int) -> Any:
        def observe(forward: Any, hidden: torch.Tensor, sequence_ids: np.ndarray) -> None:
            if not self.setup.keep_logits or not len(sequence_ids):
                return
            logits = self.workers[rank].decoder.logits(hidden).cpu()
            with self._lock:
                for row, (owner, position) in enumerate(zip(sequence_ids.tolist(), forward.positions.tolist())):
                    outcome = self.outcomes[self._owner[owner]]
                    before = outcome.logits.get(position)
                    if before is not None:
                        outcome.drift = max(outcome.drift, float((before - logits[row]).abs().max()))
                    outcome.logits[position] = logits[row].clone()

        return observe


def joined(names: Sequence[str], hub: ThreadHub, rank: int, setup: Setup, memory: GroupMemory | None) -> Exchange:
    """Return what the thread of a rank uses."""
    if memory is not None:
        return memory.rank(rank)
    if names == ("threads",):
        return hub.rank(rank)
    payload = setup.exchange_payload
    return join_all_over_links(names, hub.shape, rank, lambda ranks: hub.link(ranks, rank), payload=payload)


@dataclass(kw_only=True)
class Run:
    """All replicas of one `generate`: outcomes in the order of the prompts, and the groups' records."""

    outcomes: list[Outcome]
    groups: list[Group]

    @property
    def num_preemptions(self) -> int:
        """Over all replicas."""
        return sum(group.num_preemptions for group in self.groups)


def generate(
    checkpoint: Path,
    prompts: Sequence[Sequence[int]],
    *,
    setup: Setup | None = None,
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    one_by_one: bool = False,
    num_alone: int = 0,
) -> Run:
    """Run prompts to their end; request i goes to replica i modulo DP.

    Args:
        checkpoint: folder.
        prompts: token ids.
        setup: see `Setup`.
        params: of all requests, or one each; greedy with 16 tokens when missing.
        one_by_one: the next prompt starts when the one before is done.
        num_alone: the same, for so many prompts at the head of the list.
    """
    setup = setup or Setup()
    default = params if isinstance(params, SamplingParams) else greedy(16)
    wanted = list(params) if isinstance(params, Sequence) else [default] * len(prompts)
    groups = [Group(checkpoint, setup) for _ in range(parse_topology(setup.topology).dp)]
    outcomes = []
    try:
        for i, (prompt, choice) in enumerate(zip(prompts, wanted, strict=True)):
            group = groups[i % len(groups)]
            outcomes.append(group.submit(f"request-{i}", prompt, choice, seed=1000 + i))
            if one_by_one or i < num_alone:
                group.run()
        for group in groups:
            group.run()
    finally:
        for group in groups:
            group.__exit__()
    return Run(outcomes=outcomes, groups=groups)


def greedy(max_tokens: int, **changes: Any) -> SamplingParams:
    """Return greedy sampling that runs to its length."""
    return SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **changes})
