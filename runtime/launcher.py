"""Starts the engines of a replica set, as processes or as threads of this process.

Not the set (runtime/replicas.py) and not an engine (runtime/engine_main.py). Any thread may ask.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ..topologies.kv_sizes import shared_groups
from ..topologies.overlap_choice import moe_load
from .engine_main import run_engine
from .messages import Capturing, FromEngine, Loading, ToEngine
from .processes.group import GroupParts
from .processes.launch import EngineStart, Member, spawn_process, spawn_thread
from .replica import Replica
from .resolve import Resolved

ENGINE_MODULE = "moewe.runtime.engine_main"

OnLoading = Callable[[int, Loading | Capturing], None]


class Launcher:
    """Starts engines, all from one thread: the kernel ends a child with the thread that started it.

    Args:
        engines: `processes` or `threads`.
        on_loading: told of progress.
        parts: what ranks are made of, where engines are threads.
    """

    def __init__(self, engines: str, on_loading: OnLoading | None, parts: GroupParts | None) -> None:
        self._engines, self._on_loading, self._parts = engines, on_loading, parts
        self._spawner = ThreadPoolExecutor(1, thread_name_prefix="moewe-spawner")

    def replica(self, resolved: Resolved, index: int) -> Replica:
        """Start one."""
        start = _engine_start(resolved, index)
        member = self._spawner.submit(_spawn_engine, start, self._engines, self._parts).result()
        name = f"replica {index}" if resolved.topology.dp > 1 else ""
        watched = self._engines == "processes"
        return Replica(index, name, member, watched=watched, on_loading=self._on_loading)

    def close(self) -> None:
        """End the thread, and with it whatever it started and still runs."""
        self._spawner.shutdown()


def _engine_start(resolved: Resolved, index: int) -> EngineStart:
    num_ranks = resolved.topology.ep
    return EngineStart(
        config=resolved.config,
        replica=index,
        num_layers=resolved.model.num_layers,
        vocab_size=resolved.model.vocab_size,
        eos_token_ids=resolved.model.eos_token_ids,
        kv_groups=shared_groups(resolved.footprint.kv_groups, resolved.topology.atp),
        moe_load=moe_load(resolved.footprint),
        fixed_max_model_len=resolved.fixed_max_model_len,
        cpus=resolved.cpus[index * num_ranks : (index + 1) * num_ranks],
        label=f"replica {index} " if resolved.topology.dp > 1 else "",
    )


def _spawn_engine(start: EngineStart, engines: str, parts: GroupParts | None) -> Member:
    if engines == "processes":
        threads = start.config.parallel.threads or 1
        return spawn_process(ENGINE_MODULE, start, FromEngine, threads=threads)
    return spawn_thread(
        f"moewe-engine-{start.replica}", lambda channel: run_engine(channel, start, parts), FromEngine, ToEngine
    )
