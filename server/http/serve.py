"""The life of a server process: HTTP from the first moment, engines behind it, and an end that leaves nothing behind.

Not routes (server/http/app.py) and not engines (runtime/replicas.py). SIGTERM drains, a second one or the deadline ends
by force, SIGINT ends at once, a lost engine ends the server after a moment in which /health says so.
Units: seconds. Exit codes: 0 drained, 1 could not start or ended by force, 3 an engine was lost, 130 interrupted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping

import uvicorn

from ...runtime.config import EngineConfig
from ...runtime.fleet import Fleet
from ...runtime.generation_defaults import generation_defaults
from ...runtime.kernels import prepare_kernels
from ...runtime.messages import Failed
from ...runtime.metrics.dcgm import GpuReading
from ...runtime.metrics.export import Metrics
from ...runtime.processes.child import freeze_heap
from ...runtime.prompts import model_template, model_tokenizer, with_ends
from ...runtime.replicas import ReplicaSet
from ...runtime.resolve import Resolved, resolve
from ...topologies.advisor.trace import AppliedLine
from ..descriptors import raise_descriptor_limit
from ..hub import Hub
from ..options import VERSION, ServerOptions
from ..state import Phase, ServerState
from ..terminal.console import LoadingDisplay, StatsLine, address, tell
from .advising import Advising
from .app import build_app
from .connections import Connection
from .exporter_watch import ExporterWatch
from .layout_change import DONE, ChangeStatus, LayoutChanger
from .tls import tls_context

log = logging.getLogger(__name__)

EXIT_DRAINED, EXIT_FORCED, EXIT_NOT_STARTED, EXIT_LOST, EXIT_INTERRUPTED = 0, 1, 1, 3, 130
# How long /health says 503 after a loss before the process ends, so that probes and clients can see it.
FAILURE_GRACE_S = 1.5
FLUSH_S = 0.2
TICK_S = 0.5
CLOSE_TIMEOUT_S = 3.0
UNREADY_CLOSE_TIMEOUT_S = 0.8
KEEP_ALIVE_S = 60
MOST_HEADER_BYTES = 64 * 1024
_TERM, _INTERRUPT, _LOST, _HTTP_ENDED = "term", "interrupt", "lost", "http ended"


def run_server(config: EngineConfig | Resolved, options: ServerOptions, listener: socket.socket) -> int:
    """Serve on a socket that listens already, until told to stop or an engine is lost.

    Args:
        config: what to run, resolved here unless it is already.
        options: of the server.
        listener: bound and listening; closed at the end.

    Returns:
        The exit code.

    Raises:
        ValueError: the user's mistake; one line with the fix.
    """
    raise_descriptor_limit()
    resolved = config if isinstance(config, Resolved) else resolve(config)
    prepare_kernels(resolved.config)
    state, resolved = build_state(resolved, options)
    server = Server(state, resolved, listener)
    try:
        return asyncio.run(server.run())
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is over: a second Ctrl-C must not end in a traceback
        state.grammar_check.close()


def build_state(resolved: Resolved, options: ServerOptions) -> tuple[ServerState, Resolved]:
    """Return the state of a server that has not started its engines yet, and what they shall run.

    Raises:
        ValueError: tokenizer, chat template or generation_config.json are not as asked for.
    """
    model = resolved.config.model
    tokenizer = model_tokenizer(model)
    template = model_template(model, tokenizer)
    defaults = generation_defaults(model)
    defaults.report()
    resolved = with_ends(resolved, tokenizer, defaults.end_token_ids)
    if template is not None and template.problem is not None:
        log.warning("%s; chat requests will be refused", template.problem)
    name = (options.served_model_name or (model.model,))[0]
    metrics = Metrics(
        version=VERSION,
        model=name,
        topology=resolved.topology.long(),
        compat=options.metrics_compat,
        price_per_hour=options.price_per_hour,
    )
    state = ServerState(
        config=resolved.config,
        options=options,
        model_config=resolved.model,
        tokenizer=tokenizer,
        template=template,
        defaults=defaults,
        metrics=metrics,
        hub=Hub(metrics, most_live=resolved.topology.dp * resolved.most_requests),
        started=int(time.time()),
    )
    formats = state.output_format
    if formats.tools or formats.reasoning:
        log.info("tool calls are read as %s, reasoning as %s", formats.tools or "text", formats.reasoning or "text")
    return state, resolved


def http_config(state: ServerState) -> uvicorn.Config:
    """Return how HTTP is served; no file is read here that was not checked at start."""
    context = tls_context(state.options)
    config = uvicorn.Config(
        build_app(state),
        http=Connection,
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=state.options.limit_concurrency,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(CLOSE_TIMEOUT_S),
        h11_max_incomplete_event_size=MOST_HEADER_BYTES,
    )
    config.load()
    config.ssl = context
    return config


class Server:
    """One server: HTTP and engines.

    Args:
        state: shared with the routes.
        resolved: what the engines run.
        listener: where HTTP listens.
    """

    def __init__(self, state: ServerState, resolved: Resolved, listener: socket.socket) -> None:
        self.state = state
        self._resolved = resolved
        self._listener = listener
        self._began = time.monotonic()
        self._words: asyncio.Queue[str] = asyncio.Queue()
        self._http = _Http(http_config(state))
        self._display = LoadingDisplay()
        self._advising = Advising(state)
        self._failed: Failed | None = None
        self._sets: list[ReplicaSet] = []

    async def run(self) -> int:
        """Live; returns the exit code. No process, thread of an engine or port is left."""
        loop = asyncio.get_running_loop()
        http = asyncio.ensure_future(self._http.serve(sockets=[self._listener]))
        http.add_done_callback(lambda _: self._words.put_nowait(_HTTP_ENDED))
        loop.add_signal_handler(signal.SIGTERM, self._words.put_nowait, _TERM)
        loop.add_signal_handler(signal.SIGINT, self._words.put_nowait, _INTERRUPT)
        changer: LayoutChanger | None = None
        watch: ExporterWatch | None = None
        ticker = asyncio.ensure_future(self._tick())
        code = EXIT_NOT_STARTED
        try:
            replicas = ReplicaSet.start(self._resolved, on_loading=self._display.update)
            fleet = Fleet(replicas)
            self._sets = fleet.sets
            self.state.hub.replicas = fleet
            self.state.latest_stats = fleet.stats
            self.state.begin_trace = fleet.trace
            changer = LayoutChanger(self.state, fleet, self._resolved, self._on_failure, self._on_changed)
            self.state.layout_changer = changer
            with self._display.shown():
                replicas.attach(loop, self.state.hub.on_deltas, self._on_failure, lambda: self._on_ready(replicas))
                word = await self._first_word()
            watch = self._watch_exporter(loop) if word is None else None
            code = await self._end(word or await self._words.get())
        finally:
            if watch is not None:
                watch.close()
            ticker.cancel()
            if changer is not None:
                changer.close()
            await self._close(http, forced=code != EXIT_DRAINED)
        if self._failed is not None and self._failed.user_error:
            raise ValueError(self._failed.reason)
        return code

    # --- what happens ------------------------------------------------------------------------------------------------
    def _on_ready(self, replicas: ReplicaSet) -> None:
        freeze_heap()
        self.state.begin(replicas.ready)
        self._advising.begin(self._resolved, replicas.ready, time.monotonic() - self._began)
        self._words.put_nowait("ready")

    def _on_failure(self, failed: Failed) -> None:
        self._failed = self._failed or failed
        self._words.put_nowait(_LOST)

    def _on_changed(self, status: ChangeStatus, running: Resolved, start_s: float) -> None:
        self._advising.applied(
            AppliedLine(
                time=time.time(), before=status.before, after=status.after, outcome=status.state, seconds=status.seconds
            )
        )
        if status.state == DONE:
            self._advising.begin(running, self.state.ready, start_s)
        else:
            self._advising.restart()

    async def _first_word(self) -> str | None:
        """Wait until the engines are ready (None) or something ends the server before (that word)."""
        word = await self._words.get()
        if word != "ready":
            return word
        url = address(self.state.options, self._listener.getsockname()[1])
        names = ", ".join(self.state.names)
        took = time.monotonic() - self._began
        tell(f"moewe serves {names} as {self._resolved.topology.short()} at {url} (ready in {took:.1f} s)")
        return None

    async def _end(self, word: str) -> int:
        if word in (_INTERRUPT, _TERM) and self.state.phase is Phase.LOADING:
            self.state.enter(Phase.DRAINING)
            log.info("stopping: still loading, nothing to finish")
            return EXIT_INTERRUPTED if word == _INTERRUPT else EXIT_DRAINED
        if word == _INTERRUPT:
            self.state.enter(Phase.DRAINING)
            log.info("stopping: interrupted, %d requests were not finished", self.state.hub.num_live)
            self.state.hub.fail_all("the server was interrupted")
            return EXIT_INTERRUPTED
        if word == _LOST:
            return await self._lose()
        if word == _TERM:
            return await self._drain()
        log.error("the HTTP server ended unexpectedly")
        return EXIT_FORCED

    async def _drain(self) -> int:
        """Finish what runs, within the time allowed."""
        hub, timeout = self.state.hub, self.state.options.shutdown_timeout_s
        self.state.enter(Phase.DRAINING)
        log.info("shutting down: %d requests may finish within %g s", hub.num_live, timeout)
        deadline = time.monotonic() + timeout
        while hub.num_calls:
            left = deadline - time.monotonic()
            word = _TERM if left <= 0 else None
            with contextlib.suppress(TimeoutError):
                word = word or await asyncio.wait_for(self._words.get(), min(left, 0.05))
            if word == _TERM:
                why = "time is up" if left <= 0 else "told again"
                log.error("forced end (%s): %d requests were not finished", why, hub.num_live)
                hub.fail_all("the server shut down before this request was finished")
                return EXIT_FORCED
            if word in (_INTERRUPT, _LOST):
                return await self._end(word)
        return EXIT_DRAINED

    async def _lose(self) -> int:
        """Tell everybody that an engine is lost."""
        assert self._failed is not None
        was_serving = self.state.phase is not Phase.LOADING
        self.state.problem = self._failed.reason
        self.state.enter(Phase.FAILED)
        self.state.hub.fail_all(self._failed.reason)
        if not was_serving:
            if not self._failed.user_error:
                log.error("could not start: %s", self._failed.reason)
            return EXIT_NOT_STARTED
        log.error("engine lost: %s", self._failed.reason)
        await asyncio.sleep(FAILURE_GRACE_S)
        return EXIT_LOST

    def _watch_exporter(self, loop: asyncio.AbstractEventLoop) -> ExporterWatch | None:
        """Take counters of GPUs from the exporter that the user named, if any."""
        url = self.state.options.dcgm_url
        if url is None:
            return None

        def take(readings: Mapping[str, GpuReading]) -> None:
            ours = self.state.metrics.observe_exporter(readings)
            watch.say("" if ours else f"none of its {len(readings)} GPUs is one of ours")

        watch = ExporterWatch(url, lambda readings: _call_in(loop, take, readings))
        return watch

    async def _tick(self) -> None:
        line = StatsLine(self.state, self.state.options.log_stats_interval_s)
        while True:
            await asyncio.sleep(TICK_S)
            self.state.refresh()
            await self._advising.turn(time.monotonic())
            text = line.tick(time.monotonic())
            if text is not None:
                log.info("%s", text)

    async def _close(self, http: asyncio.Future[None], *, forced: bool) -> None:
        if forced and self.state.ready:
            await asyncio.sleep(FLUSH_S)  # errors of open streams go out
        ready = bool(self.state.ready)
        self._http.force_exit = forced or not ready
        self._http.should_exit = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(http, CLOSE_TIMEOUT_S + 1.0)
        for replicas in self._sets:
            replicas.close(CLOSE_TIMEOUT_S if ready else UNREADY_CLOSE_TIMEOUT_S)
        self._listener.close()


def _call_in(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: object) -> None:
    """Let the thread of `loop` make a call, unless all is over."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *args)


class _Http(uvicorn.Server):
    """uvicorn without its own handling of signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
