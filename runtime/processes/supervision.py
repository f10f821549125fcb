"""Who is stuck: a pure judgement over the signs of life of all ranks, and the thread that keeps asking for it.

Not recovery: a verdict ends the engine (runtime/engine_main.py). Death is noticed elsewhere too (a channel's end).
Units: seconds of a monotonic clock. Rows are those of telemetry.ProgressBoard, [W, 4] i64.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from ...telemetry import ProgressBoard
from ...telemetry.progress import STATE, STATE_IDLE, STATE_STARTING, STEP, TICK

POLL_S = 0.25
# A supervisor that was itself suspended must not count the time that it slept through against the ranks.
MOST_CREDITED_S = 1.0
# Rows a step beyond which arithmetic, not memory, sets the time of a layer on the slowest machine we mean to serve.
ROWS_PER_WEIGHT_READ = 4


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a rank may stand still: in a step or idle (`stall_s`), and while it loads (`starting_s`)."""

    stall_s: float
    starting_s: float = 600.0


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What the judge remembers: the rows it saw at `at`, and for how long each rank had not moved by then."""

    at: float
    rows: np.ndarray  # [W, 4] i64
    still_s: np.ndarray  # [W] f64


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`rank` is stuck; `reason` is for the log and for whoever waits."""

    rank: int
    reason: str


def predicted_layer_s(*, weight_bytes: int, num_layers: int, memory_bandwidth: float, num_rows: int) -> float:
    """Return a generous guess of one layer's time: its share of the weights read once per few rows."""
    if memory_bandwidth <= 0 or num_layers <= 0:
        return 0.0
    reads = max(1.0, num_rows / ROWS_PER_WEIGHT_READ)
    return weight_bytes / num_layers / memory_bandwidth * reads


def judge(
    watch: Watch | None, rows: np.ndarray, stopped: Sequence[bool], now: float, limits: Limits
) -> tuple[Watch, Verdict | None]:
    """Return what to remember, and who is stuck if somebody is.

    All ranks of a group wait in a collective for the one that does not come, so all stand still; the one to name is a
    process that a signal stopped, else the one that got least far: lowest step, then fewest operations in it.

    Args:
        watch: of the last call; None the first time.
        rows: [W, 4] i64, the board now.
        stopped: per rank, whether its process is stopped (state T).
        now: monotonic seconds.
        limits: see `Limits`.
    """
    if watch is None:
        return Watch(at=now, rows=rows, still_s=np.zeros(len(rows))), None
    passed = min(now - watch.at, MOST_CREDITED_S)
    moved = (rows != watch.rows).any(axis=1)
    still_s = np.where(moved, 0.0, watch.still_s + passed)
    watch = Watch(at=now, rows=rows, still_s=still_s)
    halted = np.asarray(stopped, bool)
    starting = (rows[:, STATE] == STATE_STARTING) & ~halted
    late = still_s >= np.where(starting, limits.starting_s, limits.stall_s)
    if not late.any():
        return watch, None
    silent = halted & (still_s >= MOST_CREDITED_S)
    candidates = np.flatnonzero(silent if silent.any() else late)
    rank = min(candidates.tolist(), key=lambda rank: _progress(rows[rank]))
    return watch, Verdict(rank=rank, reason=_describe(rank, rows[rank], still_s[rank], halted[rank], limits))


def _progress(row: np.ndarray) -> tuple[int, float]:
    return int(row[STEP]), float("inf") if row[STATE] == STATE_IDLE else float(row[TICK])


def _describe(rank: int, row: np.ndarray, still_s: float, halted: bool, limits: Limits) -> str:
    if row[STATE] == STATE_STARTING:
        where = f"while starting, after {row[TICK]} operations"
    elif row[STATE] == STATE_IDLE:
        where = f"while idle after step {row[STEP]}"
    else:
        where = f"in step {row[STEP]}, after {row[TICK]} operations of it"
    what = "is stopped by a signal (state T)" if halted else "is stuck"
    return f"rank {rank} {what}: no sign of life for {still_s:.1f} s {where}"


def process_state(pid: int) -> str | None:
    """Return the state letter of process `pid` (`R`, `S`, `T`, `Z`, ...), or None when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[0]


def has_children(pid: int) -> bool:
    """Tell whether process `pid` has started others that still exist; True where the kernel does not say."""
    try:
        return any(task.joinpath("children").read_text() for task in Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return process_state(pid) is not None


def wait_gone(pids: Sequence[int], timeout: float) -> bool:
    """Wait until none of `pids` runs any more (they need not be our children); False after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while any(process_state(pid) not in (None, "Z") for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


class Watched(Protocol):
    """What the watchdog asks of a rank."""

    def stopped(self) -> bool:
        """True when a signal stopped the process of this rank."""
        ...


class Watchdog:
    """A thread that judges the board a few times a second and reports the first verdict, once.

    Args:
        board: where ranks report.
        ranks: index = rank.
        limits: at first; `limits` may be replaced while it runs.
        on_verdict: called from the thread.
    """

    def __init__(
        self, board: ProgressBoard, ranks: Sequence[Watched], limits: Limits, on_verdict: Callable[[Verdict], None]
    ) -> None:
        self.limits = limits
        self._board = board
        self._ranks = ranks
        self._on_verdict = on_verdict
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moewe-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no more; returns when no verdict can come any more."""
        self._end.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        watch: Watch | None = None
        while not self._end.wait(POLL_S):
            stopped = [rank.stopped() for rank in self._ranks]
            watch, verdict = judge(watch, self._board.snapshot(), stopped, time.monotonic(), self.limits)
            if verdict is not None:
                self._on_verdict(verdict)
                return
