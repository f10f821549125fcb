"""What the operator of a server reads: progress while loading, the address, a line of statistics while busy.

Not metrics (runtime/metrics/export.py). Progress is a bar on a terminal and a few log lines elsewhere.
Units: bytes, tokens, seconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ...runtime.messages import Capturing, Loading
from ...telemetry import RankCounters
from ...telemetry.logs import json_is_wanted
from ..options import ServerOptions
from ..state import ServerState
from .bars import LoadingBars
from .stdout import put

log = logging.getLogger(__name__)
_LOG_STEPS = 4


class LoadingDisplay:
    """Progress of all ranks of all replicas."""

    def __init__(self) -> None:
        self._bars = LoadingBars()
        self._done: dict[tuple[int, int], tuple[int, int]] = {}
        self._logged = 0
        self._captures = False

    def update(self, replica: int, message: Loading | Capturing) -> None:
        """Take a rank's report."""
        self._bars.update(replica, message)
        if isinstance(message, Capturing):
            if not self._captures and not self._bars.visible:
                log.info("capturing CUDA graphs: %d shapes of a decode step", message.total)
            self._captures = True
            return
        self._done[replica, message.rank] = (message.done_bytes, message.total_bytes)
        done, total = (sum(column) for column in zip(*self._done.values(), strict=True))
        quarter = _LOG_STEPS * done // total if total else 0
        if quarter > self._logged and not self._bars.visible:
            self._logged = quarter
            log.info("loading weights: %d of %d MiB", done >> 20, total >> 20)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Draw while the body runs."""
        with self._bars.shown():
            yield


def address(options: ServerOptions, port: int) -> str:
    """Return the base URL of a server."""
    scheme = "http" if options.ssl_certfile is None else "https"
    return f"{scheme}://[{options.host}]:{port}" if ":" in options.host else f"{scheme}://{options.host}:{port}"


def tell(text: str) -> None:
    """Say something to whoever started the server: on stdout, or as a log line where all output is to be JSON."""
    if json_is_wanted():
        log.info("%s", text)
    else:
        put(text + "\n")


class StatsLine:
    """A line of statistics every `interval` seconds while there is something to tell.

    Args:
        state: what to tell of.
        interval: seconds; 0 or less is never.
    """

    def __init__(self, state: ServerState, interval: float) -> None:
        self._state = state
        self._interval = interval
        self._since = time.monotonic()
        self._tokens = (0, 0)
        self._counters: dict[int, list[RankCounters]] = {}

    def tick(self, now: float) -> str | None:
        """Return the line when one is due, else None; `now` is monotonic seconds."""
        elapsed = now - self._since
        if self._interval <= 0 or elapsed < self._interval:
            return None
        totals = self._state.metrics.totals
        # The counter of prompt tokens moves when a prompt is done; the line shows them as they run.
        tokens = (sum(stats.num_prompt_tokens for stats in self._state.stats), totals.generation_tokens)
        busy = tokens != self._tokens or self._state.hub.num_live > 0
        line = self._line(tokens, elapsed) if busy else None
        self._since, self._tokens = now, tokens
        self._counters = {i: replica.counters for i, replica in self._state.metrics.replicas.items()}
        return line

    def _line(self, tokens: tuple[int, int], elapsed: float) -> str:
        stats, replicas = self._state.stats, self._state.metrics.replicas
        # Engines of another layout count prompts from 0.
        prompt, generation = (max(0, new - old) / elapsed for new, old in zip(tokens, self._tokens))
        ranks = [rank for replica in replicas.values() for rank in replica.ranks]
        blocks = sum(rank.total_blocks for rank in ranks)
        usage = 100 * sum(rank.used_blocks for rank in ranks) / blocks if blocks else 0.0
        shares = [replica.overall_saturation(self._counters.get(i, [])) for i, replica in replicas.items()]
        saturation = 100 * sum(shares) / len(shares) if shares else 0.0
        cached = " (weights fit the cache)" if any(rank.cache_resident for rank in ranks) else ""
        return (
            f"running {sum(s.num_running for s in stats)}, waiting {sum(s.num_waiting for s in stats)} | "
            f"prompt {prompt:.1f} tok/s, generation {generation:.1f} tok/s | "
            f"KV {usage:.1f} % | memory saturation {saturation:.0f} %{cached}"
        )
