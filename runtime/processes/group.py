"""`Group`: the ranks of one engine, started, watched and ended together.

Not the messages to them (workers.py) and not the judgement (supervision.py): this owns their lifetime.
Units: seconds. A group of one rank runs it as a thread of the engine, unless told otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...native.library import load
from ...telemetry import ProgressBoard
from ...topologies import parse_topology
from ...topologies.exchange_choice import exchanges_to_join
from ...topologies.hardware import host_cores
from ..config import EngineConfig
from ..kernels import exchange_rule
from ..messages import FromWorker, ToWorker
from ..worker_main import WorkerFactory, run_rank
from .launch import EngineStart, Member, RunDirectory, WorkerStart, spawn_process, spawn_thread
from .supervision import Limits, Verdict, Watchdog
from .workers import Workers

if TYPE_CHECKING:
    from ...moe.wide_ep.exchanges.threads import ThreadHub

WORKER_MODULE = "moewe.runtime.worker_main"
STOP_TIMEOUT_S = 5.0
STACK_DUMP_S = 0.3


@dataclass(frozen=True, kw_only=True)
class GroupParts:
    """What a rank is made of: a factory where ranks are threads, a module where they are processes."""

    make_worker: WorkerFactory
    worker_module: str = WORKER_MODULE
    make_hub: Callable[[EngineConfig, int], ThreadHub] | None = None


class Group:
    """Running ranks.

    Args:
        start: of their engine.
        parts: what to start.

    Attributes:
        workers: to talk to them.
        as_threads: they are threads of this process.
        exchange_rule: what joins them in which step.
    """

    def __init__(self, start: EngineStart, parts: GroupParts) -> None:
        self._start = start
        self._parts = parts
        topology = parse_topology(start.config.parallel.topology)
        num_ranks = topology.ep
        # Asked here: a rank that is bound to CPUs sees no others.
        self._has_cores = topology.num_ranks * (start.config.parallel.threads or 1) <= host_cores()
        self.as_threads = num_ranks == 1 or start.config.parallel.ranks == "threads"
        has_native = num_ranks > 1 and start.config.parallel.device == "cpu" and load() is not None
        self.exchange_rule = exchange_rule(start.config, topology, has_native=has_native)
        self._directory = None if self.as_threads else RunDirectory()
        board = ProgressBoard(num_ranks, self._directory.board_path if self._directory else None)
        hub = parts.make_hub(start.config, num_ranks) if self.as_threads and num_ranks > 1 and parts.make_hub else None
        members: list[Member] = []
        try:
            for rank in range(num_ranks):
                members.append(self._spawn(self._worker_start(rank, num_ranks), board, hub))
        except OSError:
            Workers(members).kill()
            self._forget_rendezvous()
            raise
        self.workers = Workers(members, atp=topology.atp)
        limits = Limits(stall_s=start.config.schedule.stall_timeout_s)
        self.watchdog = Watchdog(board, members, limits, self._condemn)
        self.watchdog.start()

    def _worker_start(self, rank: int, num_ranks: int) -> WorkerStart:
        start = self._start
        return WorkerStart(
            config=start.config,
            rank=rank,
            num_ranks=num_ranks,
            run_directory=str(self._directory.path) if self._directory else "",
            device_index=start.replica * num_ranks + rank,
            cpus=start.cpus[rank] if start.cpus else (),
            has_cores=self._has_cores,
            label=f"{start.label}rank {rank}",
            exchanges=exchanges_to_join(self.exchange_rule.grid, self.exchange_rule.facts),
        )

    def _spawn(self, start: WorkerStart, board: ProgressBoard, hub: ThreadHub | None) -> Member:
        if not self.as_threads:
            threads = start.config.parallel.threads or 1
            return spawn_process(self._parts.worker_module, start, FromWorker, threads=threads)
        progress, make_worker = board.rank(start.rank), self._parts.make_worker
        return spawn_thread(
            f"moewe-{start.label}",
            lambda channel: run_rank(channel, start, progress, make_worker, hub, results_wait=True),
            FromWorker,
            ToWorker,
        )

    def _condemn(self, verdict: Verdict) -> None:
        member = self.workers.members[verdict.rank]
        if not member.stopped():
            member.dump_stack()
            time.sleep(STACK_DUMP_S)
        self.workers.fail(verdict.rank, verdict.reason)

    def all_met(self, limits: Limits) -> None:
        """Say that all ranks are ready: the files through which they met go, and from now on `limits` hold."""
        self._forget_rendezvous()
        self.watchdog.limits = limits

    def _forget_rendezvous(self) -> None:
        if self._directory is not None:
            self._directory.remove()

    def stop(self) -> None:
        """End the ranks in order, by force if they do not follow."""
        self.watchdog.stop()
        self.workers.stop(STOP_TIMEOUT_S)
        self._forget_rendezvous()

    def kill(self) -> None:
        """End the ranks at once."""
        self.watchdog.stop()
        self.workers.kill()
        self._forget_rendezvous()
