"""The life of one engine, in a process or a thread: start the ranks, then steps between commands and deltas.

Not the step itself (runtime/engine.py) and not the client's side (runtime/replicas.py).
Units: seconds. Exit codes: 0 stopped when asked, 1 could not start, 3 a rank or the engine was lost.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from ..native.bandwidth import llc_bytes
from ..text import Tokenizer
from ..topologies.exchange_choice import ExchangeRule
from ..topologies.exchange_cost import MeasuredLinks
from ..topologies.overlap_choice import OverlapFacts
from .config import QUICK_VARIABLE
from .deltas import seed_sequence
from .engine import Engine
from .grammar_masks import GrammarMasks, grammar_matchers
from .known_links import remember
from .kv_layout import kv_layout, scheduler_limits, step_limits
from .link_measuring import LinkMeasuring, probing
from .messages import (
    SHUTTING_DOWN,
    Abort,
    AllocateKV,
    BeginServing,
    Capturing,
    Compiled,
    Delta,
    Failed,
    KVAllocated,
    LinksProbed,
    Loaded,
    Loading,
    Outputs,
    Ready,
    Shutdown,
    StartTrace,
    Stopped,
    StopTrace,
    Submit,
    ToEngine,
    TraceProgress,
    WarmUp,
    refusal,
)
from .overlap import log_overlap, overlap_facts
from .processes.channel import Channel, ChannelClosed
from .processes.child import enter_child, freeze_heap, log_as
from .processes.group import Group, GroupParts
from .processes.launch import EngineStart
from .processes.workers import RankLost
from .prompts import model_tokenizer
from .ranges import moves_experts
from .rank_parts import build_hub, build_worker
from .reporter import StatsReporter
from .scheduler import Scheduler
from .start_up import check_blocks, collective_timeout_s, stall_limits
from .step_recorder import StepRecorder
from .text_output import TextOutput

log = logging.getLogger("moewe.runtime.engine_main")  # __name__ is __main__ in a process of its own

EXIT_STOPPED, EXIT_NOT_STARTED, EXIT_LOST = 0, 1, 3
HEARTBEAT_S = 1.0
STEP_TIMEOUT_S = 0.5
TRACE_PROGRESS_EVERY_S = 0.25
# Deltas that a client may leave unread before the engine waits for it.
MOST_UNREAD_BYTES = 8 << 20
# Tests set this: books that do not balance then end the engine instead of being mended.
STRICT_VARIABLE = "MOEWE_STRICT_BOOKS"


class EngineLoop:
    """One engine with its ranks and its client.

    Args:
        client: commands come from here, everything that happens goes there.
        start: what to run.
        parts: what ranks are made of.
        on_ready: called once, when it is.
    """

    def __init__(
        self,
        client: Channel[ToEngine],
        start: EngineStart,
        parts: GroupParts,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        self._client = client
        self._start = start
        self._parts = parts
        self._on_ready = on_ready
        self._group: Group | None = None
        self._engine: Engine | None = None
        self._reporter: StatsReporter | None = None
        self._commands: deque[ToEngine] = deque()
        self._shutdown: Shutdown | None = None
        self._trace_told = 0.0

    def run(self) -> int:
        """Live until `Shutdown`, the end of the client, or a loss. Returns the exit code; no rank is left."""
        try:
            self._group = group = Group(self._start, self._parts)
            self._reporter = StatsReporter(self._client, group.workers)
            if moves_experts(self._start.config):
                # Before the first word, which is waited for longest: it brings torch, and that may take many seconds.
                from . import live_balance  # noqa: F401
            tokenizer = model_tokenizer(self._start.config.model)
            ready = self._start_up(group)
            if ready is not None:
                self._engine = self._make_engine(group, ready, tokenizer)
                on_host = self._start.config.parallel.device == "cpu"
                self._reporter.cache_resident |= on_host and sum(ready.weight_bytes) <= llc_bytes()
                if self._on_ready is not None:
                    self._on_ready()
                self._report(self._engine)
                self._client.send(ready)
                self._serve(self._engine)
            if ready is None:
                group.kill()  # they load, or import: nothing to save, and no need to wait until they listen
            else:
                group.stop()
            self._say_last(Stopped())
            return EXIT_STOPPED
        except ChannelClosed:
            log.warning("the client is gone; ending")
            failed = None
        except RankLost as lost:
            failed = Failed(reason=lost.reason, rank=lost.rank, user_error=lost.user_error)
        except Exception as error:
            user_error = isinstance(error, ValueError) and self._engine is None
            if not user_error:
                log.exception("the engine failed")
            reason = str(error) if user_error else f"the engine failed: {type(error).__name__}: {error}"
            failed = Failed(reason=reason, user_error=user_error)
        if self._group is not None:
            self._group.kill()
        if failed is not None:
            log.error("%s", failed.reason)
            self._say_last(failed)
        return EXIT_NOT_STARTED if self._engine is None else EXIT_LOST

    def _say_last(self, message: Failed | Stopped) -> None:
        """Say the last word, after the ranks are gone; a client that does not listen does not hold us up."""
        try:
            self._client.send(message, timeout=2.0)
        except (ChannelClosed, TimeoutError):
            log.warning("nobody heard: %s", type(message).__name__)

    # --- start-up --------------------------------------------------------------------------------------------------
    def _start_up(self, group: Group) -> Ready | None:
        """Bring all ranks to the point where they wait for plans; None when `Shutdown` came first."""
        num_ranks = group.workers.num_ranks
        ready: Ready | None = None
        measuring: LinkMeasuring | None = None
        loaded: dict[int, Loaded] = {}
        allocated: dict[int, KVAllocated] = {}
        num_blocks = num_compiled = 0
        while measuring is None or not measuring.is_done:
            self._listen(group)
            if self._may_end_unready():
                return None
            for message in group.workers.receive(0.0):
                match message:
                    case Loading() | Capturing():
                        self._client.post(message)
                    case Loaded():
                        loaded[message.rank] = message
                        if len(loaded) == num_ranks:
                            num_blocks = min(rank.num_blocks for rank in loaded.values())
                            check_blocks(self._start, num_blocks)
                            for line in loaded[0].kernels:
                                log.info("kernels: %s", line)
                            group.workers.broadcast(AllocateKV(num_blocks=num_blocks))
                    case Compiled():
                        num_compiled += 1
                        if num_compiled == num_ranks:
                            group.workers.broadcast(WarmUp())
                    case KVAllocated():
                        allocated[message.rank] = message
                        if len(allocated) == num_ranks:
                            ranks = [(loaded[rank], allocated[rank]) for rank in range(num_ranks)]
                            ready, measuring = self._all_warm(group, ranks, num_blocks)
                            measuring.begin()
                    case LinksProbed():
                        assert measuring is not None, "nobody asked for probes"
                        measuring.take(message)
            self._report(None)
        assert ready is not None
        self._keep(group.exchange_rule, measuring.links)
        return msgspec.structs.replace(ready, links=measuring.links)

    def _keep(self, rule: ExchangeRule, links: MeasuredLinks | None) -> None:
        """Keep what real ranks measured for the next `--topology auto` and for advice."""
        parallel = self._start.config.parallel
        is_real = parallel.ranks == "processes" and not os.environ.get(QUICK_VARIABLE)
        if links is not None and is_real and self._start.replica == 0:
            for cost in links.exchanges:
                remember(parallel.device, rule.grid.topology, cost)

    def _all_warm(
        self, group: Group, ranks: Sequence[tuple[Loaded, KVAllocated]], num_blocks: int
    ) -> tuple[Ready, LinkMeasuring]:
        """Let timers of serving begin, as all ranks are warm; return what is known, and what is to be measured."""
        limits = stall_limits(self._start, ranks)
        group.all_met(limits)
        group.workers.broadcast(BeginServing(timeout_s=collective_timeout_s(limits)))
        assert self._reporter is not None
        self._reporter.cache_resident = any(warm.cache_resident for _, warm in ranks)
        config = self._start.config
        ready = Ready(
            num_blocks=num_blocks,
            block_size=config.cache.block_size,
            max_model_len=kv_layout(self._start.kv_groups, step_limits(config), num_blocks).max_model_len,
            max_num_seqs=config.schedule.max_num_seqs,
            memory_bandwidth=tuple(warm.memory_bandwidth for _, warm in ranks),
            weight_bytes=tuple(rank.weight_bytes for rank, _ in ranks),
            weight_bytes_read=tuple(rank.weight_bytes_read for rank, _ in ranks),
            expert_slots=tuple(rank.expert_slots for rank, _ in ranks),
            weight_kinds=tuple(rank.weight_kinds for rank, _ in ranks),
            kv_bytes=tuple(warm.kv_bytes for _, warm in ranks),
            matrix_rates=tuple(warm.matrix_rates for _, warm in ranks),
            isa=ranks[0][1].isa,
            gpus=tuple(warm.gpu for _, warm in ranks if warm.gpu is not None),
            pids=tuple(member.pid for member in group.workers.members),
        )
        probes = probing(group.exchange_rule, self._overlap_facts(group, ready), config.schedule.max_num_batched_tokens)
        return ready, LinkMeasuring(group.workers, probes)

    def _make_engine(self, group: Group, ready: Ready, tokenizer: Tokenizer | None) -> Engine:
        facts = self._overlap_facts(group, ready)
        log_overlap(group.exchange_rule, facts, self._start.config.schedule.max_num_batched_tokens)
        limits = replace(
            scheduler_limits(self._start.config, self._start.kv_groups, num_blocks=ready.num_blocks),
            exchange_rule=group.exchange_rule,
            overlap_facts=facts,
            eos_token_ids=self._start.eos_token_ids,
        )
        engine = Engine(
            Scheduler(limits),
            group.workers,
            make_text=lambda params: TextOutput(tokenizer, params),
            token_text=tokenizer.token_text if tokenizer is not None else None,
            seeds=seed_sequence(self._start.config.model.seed, self._start.replica),
            masks=None
            if tokenizer is None
            else GrammarMasks(grammar_matchers(tokenizer, self._start.vocab_size, self._start.eos_token_ids)),
        )
        if moves_experts(self._start.config):
            from .live_balance import live_balancer

            engine.balancer = live_balancer(self._start.config, ready, group.workers)
        return engine

    def _overlap_facts(self, group: Group, ready: Ready) -> OverlapFacts:
        config, rule = self._start.config, group.exchange_rule
        multiplied = "int8" if config.model.quantization else config.model.dtype  # int4 multiplies like int8
        rates = [rank.get(multiplied) for rank in ready.matrix_rates]
        return overlap_facts(
            config,
            rule.grid,
            self._start.moe_load,
            memory_bandwidth=min(ready.memory_bandwidth),
            matrix_rate=min((rate for rate in rates if rate), default=None),
            links=ready.links,
        )

    # --- serving ---------------------------------------------------------------------------------------------------
    def _serve(self, engine: Engine) -> None:
        assert self._group is not None
        strict = bool(os.environ.get(STRICT_VARIABLE))
        while True:
            self._report(engine)
            if engine.has_work:
                self._take_commands()
            else:
                self._listen(self._group)
                self._group.workers.receive(0.0)
            while self._commands:
                self._obey(engine, self._commands.popleft())
            if self._shutdown is not None and not (self._shutdown.drain and engine.has_work):
                if engine.recorder is not None:
                    self._end_trace(engine, engine.recorder)
                return
            if engine.has_work:
                self._emit(engine.step(timeout=STEP_TIMEOUT_S))
                if engine.recorder is not None:
                    self._tell_of_trace(engine, engine.recorder)
                if not engine.has_work:
                    self._emit(engine.settle(strict=strict))

    def _listen(self, group: Group) -> None:
        """Wait in the kernel until the client or a rank has something to say, for at most a heartbeat."""
        poll = select.poll()
        poll.register(self._client, select.POLLIN | (select.POLLOUT if self._client.pending_bytes else 0))
        for fd in group.workers.filenos():
            poll.register(fd, select.POLLIN)
        poll.poll(0 if self._client.has_messages else HEARTBEAT_S * 1000)
        self._client.flush()
        self._take_commands()

    def _take_commands(self) -> None:
        self._commands.extend(self._client.receive_ready())

    def _may_end_unready(self) -> bool:
        """Tell whether `Shutdown` came, and with no request before it that it lets finish."""
        ends = [command for command in self._commands if isinstance(command, Shutdown)]
        return bool(ends) and not (ends[-1].drain and any(isinstance(c, Submit) for c in self._commands))

    def _obey(self, engine: Engine, command: ToEngine) -> None:
        match command:
            case Shutdown():
                self._shutdown = command
            case Submit(request_id=request_id) if self._shutdown is not None:
                self._emit([refusal(request_id, "the server is shutting down", SHUTTING_DOWN)])
            case Submit():
                refused = engine.add(command)
                self._emit([refused] if refused is not None else [])
            case Abort(request_ids=request_ids):
                self._emit(engine.abort(request_ids))
            case StartTrace():
                assert self._group is not None
                engine.recorder = StepRecorder(command, self._group.workers.num_ranks)
                self._group.workers.on_result = engine.recorder.see
            case StopTrace(trace_id=trace_id) if engine.recorder is not None and engine.recorder.trace_id == trace_id:
                self._end_trace(engine, engine.recorder)

    def _tell_of_trace(self, engine: Engine, recorder: StepRecorder) -> None:
        """Say how far a trace is, now and then, and hand it over when it is done."""
        if recorder.is_done:
            self._end_trace(engine, recorder)
        elif (now := time.monotonic()) - self._trace_told >= TRACE_PROGRESS_EVERY_S:
            self._trace_told = now
            self._client.post(TraceProgress(trace_id=recorder.trace_id, num_steps=recorder.num_booked))

    def _end_trace(self, engine: Engine, recorder: StepRecorder) -> None:
        assert self._group is not None
        engine.recorder = self._group.workers.on_result = None
        self._client.post(recorder.traced())

    def _emit(self, deltas: list[Delta]) -> None:
        if deltas:
            self._client.post(Outputs(deltas=tuple(deltas)))
        while self._client.pending_bytes > MOST_UNREAD_BYTES:
            self._client.wait_sent(HEARTBEAT_S)

    def _report(self, engine: Engine | None) -> None:
        assert self._reporter is not None
        self._reporter.report(engine)


def run_engine(
    client: Channel[ToEngine],
    start: EngineStart,
    parts: GroupParts | None = None,
    on_ready: Callable[[], None] | None = None,
) -> int:
    """Live as an engine; see `EngineLoop.run`."""
    return EngineLoop(client, start, parts or real_parts(), on_ready).run()


def real_parts() -> GroupParts:
    """Return what ranks are made of outside tests."""
    return GroupParts(make_worker=build_worker, make_hub=build_hub)


def main() -> None:
    """Be an engine process."""
    client: Channel[EngineStart | ToEngine] = enter_child(EngineStart | ToEngine)
    start = client.receive()
    assert isinstance(start, EngineStart)
    log_as(f"{start.label}engine")
    code = run_engine(client, start, on_ready=freeze_heap)  # type: ignore[arg-type]
    sys.stderr.flush()
    os._exit(code)  # threads of ranks that were cut off could block an orderly exit


if __name__ == "__main__":
    main()
