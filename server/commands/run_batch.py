"""`moewe run-batch`: a file of requests in OpenAI's batch format, answered into another file.

Not a server: no port is opened; every line goes through the routes of the HTTP server in this process, so it is checked
and answered as there. Answers stand in the order of their ends. Not resumable: the output is written anew.
Units: lines. Exit codes: 0 the file was processed, whatever came of single lines; 3 an engine was lost,
130 interrupted.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ..flags.values import Settings
from ..protocol.batch_lines import LineError, answer_line, error_line, read_line
from .serve import config_of, server_options

if TYPE_CHECKING:
    from ...runtime.resolve import Resolved
    from ..options import ServerOptions
    from ..state import ServerState

EXIT_LOST, EXIT_INTERRUPTED = 3, 130
BUSY = 429
RETRY_S = 0.05
CLOSE_TIMEOUT_S = 3.0
Post = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]


@dataclass
class Outcome:
    """How many lines were answered well and not."""

    succeeded: int = 0
    failed: int = 0
    ids: set[str] = field(default_factory=set)


def run_batch(settings: Settings) -> int:
    """Answer every line of the input file; returns the exit code."""
    source, target = _files(settings.tool)
    options, config = server_options(settings.http), config_of(settings)
    from ...runtime.kernels import prepare_kernels
    from ...runtime.resolve import check_checkpoint, resolve
    from ...runtime.session import locate

    resolved = resolve(locate(config))
    check_checkpoint(resolved)
    prepare_kernels(resolved.config)
    with source.open("rb") as lines, target.open("wb") as out:
        return asyncio.run(_run(resolved, options, lines, out))


def _files(tool: dict[str, str]) -> tuple[Path, Path]:
    for name, flag in (("input_file", "-i"), ("output_file", "-o")):
        if name not in tool:
            raise ValueError(f"no --{name.replace('_', '-')} is given; name a file with {flag}")
    source, target = Path(tool["input_file"]).expanduser(), Path(tool["output_file"]).expanduser()
    if not source.is_file():
        raise ValueError(f"--input-file {str(source)!r} is not a file")
    if not target.parent.is_dir() or target.is_dir():
        raise ValueError(f"--output-file {str(target)!r} cannot be written; name a file in a folder that exists")
    if target.exists() and target.samefile(source):
        raise ValueError("--output-file is the input file; name another")
    return source, target


async def _run(resolved: Resolved, options: ServerOptions, lines: IO[bytes], out: IO[bytes]) -> int:
    from ..http.app import build_app
    from ..http.in_process import post
    from ..terminal.bars import counting

    halt = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, halt.set)
    total = sum(1 for line in lines if line.strip())
    lines.seek(0)
    outcome = Outcome()
    async with engines(resolved, options, halt) as state:
        if not halt.is_set():
            app = build_app(state)
            most = 2 * resolved.topology.adp * resolved.topology.dp * resolved.config.schedule.max_num_seqs
            with counting("requests", total) as advance:
                await answer_all(
                    lines, out, lambda url, body: post(app, url, body), outcome, most=most, halt=halt, on_done=advance
                )
    done = outcome.succeeded + outcome.failed
    print(f"moewe: {outcome.succeeded} of {total} requests succeeded, {outcome.failed} failed", file=sys.stderr)
    if state.problem:
        print(f"moewe: error: the engine is lost: {state.problem}", file=sys.stderr)
        return EXIT_LOST
    if halt.is_set() and done < total:
        print(f"moewe: interrupted; {done} of {total} lines are answered", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


@asynccontextmanager
async def engines(resolved: Resolved, options: ServerOptions, halt: asyncio.Event) -> AsyncIterator[ServerState]:
    """Start the replicas behind a server's state and wait until they are ready, or `halt` is set.

    Raises:
        ValueError: they could not start.
    """
    from ...runtime.messages import Failed
    from ...runtime.replicas import ReplicaSet
    from ..http.serve import build_state
    from ..state import Phase
    from ..terminal.bars import LoadingBars

    state, resolved = build_state(resolved, options)
    loop, bars, ready = asyncio.get_running_loop(), LoadingBars(), asyncio.Event()
    replicas = ReplicaSet.start(resolved, on_loading=bars.update)
    state.hub.replicas, state.latest_stats = replicas, replicas.stats

    def on_ready() -> None:
        state.begin(replicas.ready)
        ready.set()

    def on_failure(failed: Failed) -> None:
        state.problem = state.problem or failed.reason
        state.enter(Phase.FAILED)
        state.hub.fail_all(failed.reason)
        ready.set()
        halt.set()

    try:
        with bars.shown():
            replicas.attach(loop, state.hub.on_deltas, on_failure, on_ready)
            waiting = [asyncio.ensure_future(event.wait()) for event in (ready, halt)]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for each in waiting:
                each.cancel()
        if state.problem:
            raise ValueError(f"could not start: {state.problem}")
        yield state
    finally:
        replicas.close(CLOSE_TIMEOUT_S)


async def answer_all(
    lines: IO[bytes],
    out: IO[bytes],
    post: Post,
    outcome: Outcome,
    *,
    most: int,
    halt: asyncio.Event,
    on_done: Callable[[], None] = lambda: None,
) -> None:
    """Answer every line, many at a time, until all are done or `halt` is set.

    Args:
        lines, out: files, read and written as it goes.
        post: runs one request: url and body in, status and body out.
        outcome: counts.
        most: requests that run at once.
        on_done: told of every answer.
    """
    running: set[asyncio.Task[None]] = set()
    waiter = asyncio.ensure_future(halt.wait())
    failures: list[BaseException] = []  # a full disk, a bug: not of one line alone
    numbers = 0

    def ended(task: asyncio.Task[None]) -> None:
        running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            failures.append(error)
            halt.set()

    async def one(number: int, line: bytes) -> None:
        text, fine = await _answer(number, line, post, outcome.ids, alone=lambda: len(running) <= 1)
        out.write(text)
        out.flush()
        outcome.succeeded += fine
        outcome.failed += not fine
        on_done()

    try:
        for line in lines:
            if not line.strip():
                continue
            numbers += 1
            running.add(task := asyncio.ensure_future(one(numbers, line)))
            task.add_done_callback(ended)
            while len(running) >= most and not halt.is_set():
                await asyncio.wait({*running, waiter}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)
            if halt.is_set():
                return
        while running and not halt.is_set():
            await asyncio.wait({*running, waiter}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()
        for task in list(running):
            task.cancel()
        await asyncio.gather(waiter, *running, return_exceptions=True)
        if failures:
            raise failures[0]


async def _answer(
    number: int, line: bytes, post: Post, ids: set[str], *, alone: Callable[[], bool]
) -> tuple[bytes, bool]:
    """Return the line that answers `line`, and whether it succeeded.

    A full queue is waited out: others of this file fill it. Only who is refused while nothing else runs is told.
    """
    try:
        request = read_line(line)
        if request.custom_id in ids:
            raise LineError("duplicate_custom_id", "custom_id stands on an earlier line already", request.custom_id)
        ids.add(request.custom_id)
    except LineError as error:
        return error_line(number, error), False
    while True:
        last_chance = alone()
        status, body = await post(request.url, request.body)
        if status != BUSY or last_chance:
            return answer_line(number, request.custom_id, status, body), status == 200
        await asyncio.sleep(RETRY_S)
