"""The life of one rank, in a process or a thread: join the group, load, allocate, then answer plans until told to stop.

Not the work of a step (runtime/worker.py) and not what a rank is made of (rank_parts.py). An idle rank, and one that
waits while others still load or compile, waits in the kernel and gives a sign of life each second.
Units: seconds, bytes, blocks.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..telemetry import ProgressBoard, RankProgress
from ..telemetry.progress import STATE_BUSY, STATE_IDLE, STATE_STARTING
from ..topologies.groups import limit_waits
from ..topologies.link_probes import LinkProbe, RankFound
from ..topologies.meeting import PeersLostError
from .messages import (
    AllocateKV,
    BeginServing,
    Capturing,
    Compiled,
    DropMoves,
    KVAllocated,
    LinksProbed,
    Loaded,
    Loading,
    Message,
    PrepareMoves,
    ProbeLinks,
    RankCounted,
    RunStep,
    StepDone,
    StopWorker,
    ToWorker,
    WarmUp,
    WorkerFailed,
)
from .plan import RankPlan, RankResult, StepHeader
from .processes.channel import Channel, ChannelClosed
from .processes.child import enter_child, freeze_heap, log_as
from .processes.heap import give_back_free_memory
from .processes.launch import WorkerStart, board_path
from .rank_parts import build_worker

if TYPE_CHECKING:
    from ..moe.wide_ep.exchanges.threads import ThreadHub
    from .graphs.starting import OnProgress
    from .rebalancing.rank_moves import RankMoves

log = logging.getLogger("moewe.runtime.worker_main")  # __name__ is __main__ in a process of its own

HEARTBEAT_S = 0.5
TIDY_AFTER = 4  # heartbeats without a message: memory that steps left behind goes back to the system
LOADING_EVERY_S = 0.1
# A report that starts so is about somebody else: this rank only noticed that a collective broke.
PEERS_LOST = "lost the other ranks: "


class RankWorker(Protocol):
    """What this loop asks of a worker (runtime/worker.py; tests bring their own)."""

    @property
    def moves(self) -> RankMoves | None:
        """Moves of its experts while serving; None where they stay."""
        ...

    def load(self) -> Loaded:
        """Put weights in place."""
        ...

    def allocate(self, num_blocks: int) -> None:
        """Hold KV and compile what steps need; no other rank is waited for."""
        ...

    def warm_up(self) -> KVAllocated:
        """Run steps, capture those that can be, and measure the memory, with all ranks of the group."""
        ...

    def probe(self, probe: LinkProbe) -> RankFound:
        """Time an exchange or MoE layers, with all ranks of the group."""
        ...

    def run(self, header: StepHeader, plan: RankPlan, before_layers: Callable[[], None] | None = None) -> RankResult:
        """Run one step with all ranks of the group; call `before_layers` when layers can run, or a GPU runs them."""
        ...

    def late_counters(self) -> bytes:
        """Return the counters when some of them have not gone out with a result; else nothing."""
        ...


class WorkerFactory(Protocol):
    """Makes the worker of one rank; `hub` joins ranks that are threads, None means a process or a single rank."""

    def __call__(
        self, start: WorkerStart, progress: RankProgress, on_loading: OnProgress, hub: ThreadHub | None
    ) -> RankWorker:
        """Return a worker that has not loaded yet."""
        ...


def run_rank(
    channel: Channel[ToWorker],
    start: WorkerStart,
    progress: RankProgress,
    make_worker: WorkerFactory,
    hub: ThreadHub | None = None,
    on_ready: Callable[[], None] | None = None,
    *,
    results_wait: bool = False,
) -> bool:
    """Live as rank `start.rank` until `StopWorker`, the end of the channel, or an error, which is reported.

    Args:
        channel: to the engine.
        start: what to be.
        progress: of this rank.
        make_worker: makes what runs the steps.
        hub: joins ranks that are threads.
        on_ready: called when KV is there and measured.
        results_wait: for the next step, see `_Results`.

    Returns:
        True after `StopWorker`, False when it ended otherwise.
    """
    rank = start.rank
    user_errors: tuple[type[Exception], ...] = (ValueError,)
    stopped = False
    try:
        if start.cpus:
            os.sched_setaffinity(0, start.cpus)
        progress.enter(STATE_STARTING, -1)
        worker = make_worker(start, progress, _reporter(channel, rank, progress), hub)
        channel.send(worker.load())
        user_errors = ()
        results = _Results(channel, progress, wait=results_wait)
        try:
            stopped = _serve(channel, worker, rank, progress, results, on_ready)
        finally:
            results.release()
            if worker.moves is not None:
                worker.moves.close()
    except ChannelClosed:
        log.info("rank %d was cut off", rank)
    except Exception as error:
        _report(channel, rank, error, user_error=isinstance(error, user_errors))
    finally:
        if hub is not None and not stopped:
            hub.abort(f"rank {rank} has ended")
    return stopped


def _serve(
    channel: Channel[ToWorker],
    worker: RankWorker,
    rank: int,
    progress: RankProgress,
    results: _Results,
    on_ready: Callable[[], None] | None,
) -> bool:
    idle = 0
    following: ToWorker | None = None
    while True:
        message, following = following or channel.receive(HEARTBEAT_S), None
        progress.heartbeat()
        idle = 0 if message else idle + 1
        match message:
            case None:
                if idle == TIDY_AFTER:
                    give_back_free_memory()
                # A stop string or an abort ends a request behind this rank's back: its last counters go out now.
                if counters := worker.late_counters():
                    _send_alive(channel, RankCounted(rank=rank, counters=counters), progress)
            case PrepareMoves() | DropMoves():
                assert worker.moves is not None, "experts of this rank stay"
                worker.moves.obey(message)
            case RunStep(header=header, plan=plan):
                progress.enter(STATE_BUSY, header.step)
                result = worker.run(header, plan, results.release)
                results.release()
                progress.enter(STATE_IDLE, header.step)
                following = channel.receive(0.0)
                results.add(StepDone(rank=rank, result=result), goes_on=isinstance(following, RunStep))
            case AllocateKV(num_blocks=num_blocks):
                worker.allocate(num_blocks)
                _send_alive(channel, Compiled(rank=rank), progress)
            case WarmUp():
                warm = worker.warm_up()
                if on_ready is not None:
                    on_ready()
                progress.enter(STATE_IDLE, -1)
                _send_alive(channel, warm, progress)
            case BeginServing(timeout_s=timeout_s):
                limit_waits(timeout_s)
            case ProbeLinks(probe=probe):
                progress.enter(STATE_STARTING, -1)
                found = worker.probe(probe)
                progress.enter(STATE_IDLE, -1)
                _send_alive(channel, LinksProbed(rank=rank, found=found), progress)
            case StopWorker():
                return True
        if worker.moves is not None and (report := worker.moves.take_report()) is not None:
            _send_alive(channel, report, progress)


class _Results:
    """Results on their way to the engine.

    Where a rank is a thread of its engine, both want the interpreter when a step has ended: the rank to prepare the
    next one, whose plan is there already, and the engine to book this one. The rank goes first: a result waits until
    the next step has all that it needs and native code, which needs no interpreter, is about to run. On a GPU it waits
    until a graph is launched, as the device does nothing before; the engine learns of it while the next step runs.

    Args:
        channel: to the engine.
        progress: shows signs of life while the engine does not read.
        wait: results wait; else each goes at once.
    """

    def __init__(self, channel: Channel[ToWorker], progress: RankProgress, *, wait: bool) -> None:
        self._channel, self._progress, self._wait = channel, progress, wait
        self._held: StepDone | None = None

    def add(self, result: StepDone, *, goes_on: bool) -> None:
        """Take the result of a step; `goes_on` when another step follows at once."""
        assert self._held is None, "released before each step"
        self._held = result
        if not (self._wait and goes_on):
            self.release()

    def release(self) -> None:
        """Send what waits."""
        if self._held is not None:
            result, self._held = self._held, None
            _send_alive(self._channel, result, self._progress)


def _send_alive(channel: Channel[ToWorker], message: Message, progress: RankProgress) -> None:
    """Send, with signs of life while the engine does not read."""
    channel.post(message)
    while not channel.wait_sent(HEARTBEAT_S):
        progress.heartbeat()


def _reporter(channel: Channel[ToWorker], rank: int, progress: RankProgress) -> OnProgress:
    last = 0.0

    def report(done: int, total: int, /, *, of_graphs: bool = False) -> None:
        nonlocal last
        progress.tick()
        now = time.monotonic()
        if now - last >= LOADING_EVERY_S or done >= total:
            last = now
            channel.send(
                Capturing(rank=rank, done=done, total=total)
                if of_graphs
                else Loading(rank=rank, done_bytes=done, total_bytes=total)
            )

    return report


def _report(channel: Channel[ToWorker], rank: int, error: Exception, *, user_error: bool) -> None:
    text = str(error).strip()
    if user_error:
        reason = text.splitlines()[0] if text else type(error).__name__
    else:
        log.error("rank %d failed", rank, exc_info=error)
        first = text.splitlines()[0] if text else ""
        kind = PEERS_LOST if isinstance(error, PeersLostError) else f"{type(error).__name__}: "
        reason = f"{kind}{first}".rstrip(": ")
    try:
        channel.send(WorkerFailed(rank=rank, reason=reason, user_error=user_error), timeout=5.0)
    except (ChannelClosed, TimeoutError):
        log.error("rank %d could not report its failure: nobody listens", rank)


def main() -> None:
    """Be a worker process."""
    channel: Channel[WorkerStart | ToWorker] = enter_child(WorkerStart | ToWorker)
    start = channel.receive()
    assert isinstance(start, WorkerStart)
    log_as(start.label)
    progress = ProgressBoard(start.num_ranks, board_path(Path(start.run_directory))).rank(start.rank)
    awaits: Channel[ToWorker] = channel  # type: ignore[assignment]
    on_gpu = start.config.parallel.device.startswith("cuda")
    fine = run_rank(awaits, start, progress, build_worker, on_ready=freeze_heap, results_wait=on_gpu)
    sys.stderr.flush()
    os._exit(0 if fine else 1)  # collectives of a broken group could block an orderly exit


if __name__ == "__main__":
    main()
