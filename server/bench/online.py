"""`moewe bench serve`: load on a running server, and what it made of it.

Not the server. Order: everything that can be refused is refused before the first request; a warm-up that fails ends
the run with the server's own words. Units: seconds, tokens.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from rich.console import Console

from ..client.target import Target, read_extra_body, read_target
from ..descriptors import raise_descriptor_limit
from ..terminal.bars import counting
from .arrivals import arrival_times
from .chosen import chosen_files, chosen_samples, chosen_tokenizer, dataset_name
from .client import Client, connections
from .datasets import TRACE, Prompts, Sample
from .dialect import Dialect
from .load import LoadResult, run_load
from .plot import require
from .records import RequestRecord
from .report import publish, record
from .scrape import Watch, server_facts
from .statistics import parse_goals, reasons, results

BUSY_SHARE = 0.85
_Result = TypeVar("_Result")
# Kept out of the record: where to write, what is shown elsewhere, and everything secret.
_NOT_SETTINGS = frozenset(
    {"output_json", "plot", "api_key", "header", "base_url", "goodput", "endpoint", "num_prompts"}
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is measured and what it is held against.

    Attributes:
        samples: to send, at `arrivals`.
        goals: limits in ms.
        extra: further fields of every request.
        settings: for the record; nothing secret.
        tool: values of the flags.
    """

    target: Target
    samples: list[Sample]
    arrivals: list[float]
    goals: dict[str, float]
    extra: dict[str, Any]
    settings: dict[str, Any]
    tool: Mapping[str, Any]


def bench_serve(tool: Mapping[str, Any]) -> int:
    """Measure, print, write; returns the exit code: 1 when no request succeeded, 130 when interrupted."""
    require("aiohttp", "moewe bench serve")
    files = chosen_files(tool)
    run = prepare(tool, os.environ)
    raise_descriptor_limit()
    console = Console(file=sys.stderr)
    load, figures, server = asyncio.run(measure(run, console))
    content = record("bench serve", run.settings, server, figures)
    title = f"{run.settings['model']} at {run.settings['base_url']}"
    ended = f"{len(load.records)} of {len(run.samples)} requests had ended"
    return publish(content, load.records, files, title=title, interrupted=ended if load.stopped else None)


def prepare(tool: Mapping[str, Any], environment: Mapping[str, str]) -> Run:
    """Return what to measure, everything checked that can be without a server."""
    target = read_target(tool, environment)
    goals = parse_goals(tool.get("goodput", ()))
    extra = read_extra_body(tool.get("extra_body"))
    seed, rate = tool.get("seed", 0), tool.get("request_rate", math.inf)
    for name, least in (("max_concurrency", 1), ("num_warmups", 0), ("seed", 0)):
        if name in tool and tool[name] < least:
            raise ValueError(f"--{name.replace('_', '-')} {tool[name]} is not allowed; use at least {least}")
    if not tool.get("timeout", 1.0) > 0 or not math.isfinite(tool.get("timeout", 1.0)):
        raise ValueError(f"--timeout {tool['timeout']:g} is not allowed; use a number of seconds above 0")
    if not 0 <= tool.get("temperature", 0.0) < math.inf:
        raise ValueError(f"--temperature {tool['temperature']:g} is not allowed; use 0 or more")
    dataset = dataset_name(tool)
    if dataset == TRACE and tool.keys() & {"request_rate", "burstiness"}:
        raise ValueError(
            "--request-rate and --burstiness say nothing about a trace, which has its own times; --trace-speed"
        )
    tokenizer = chosen_tokenizer(tool)
    form = tool.get("prompt_form", "text" if target.chat else "ids")
    if form not in ("ids", "text") or (form == "ids" and target.chat):
        raise ValueError(f"--prompt-form {form!r} is not allowed here; use ids (completions only) or text")
    vocab_size = tool.get("vocab_size", tokenizer.vocab_size if tokenizer is not None else 1000)
    prompts = Prompts(as_ids=form == "ids", vocab_size=vocab_size, tokenizer=tokenizer, seed=seed)
    samples = chosen_samples(tool, prompts)
    if any(sample.arrival is not None for sample in samples):
        arrivals = [sample.arrival or 0.0 for sample in samples]
    else:
        arrivals = arrival_times(len(samples), rate, burstiness=tool.get("burstiness", 1.0), seed=seed)
    settings = {
        "base_url": target.root,
        "endpoint": target.url.removeprefix(target.root),
        "model": tool.get("model"),
        "dataset_name": dataset,
        "num_prompts": len(samples),
        "prompt_form": "ids" if isinstance(samples[0].prompt, list) else "text",
        "request_rate": None if dataset == TRACE else rate,
        "max_concurrency": None,
        "seed": seed,
        **{name: value for name, value in tool.items() if name not in _NOT_SETTINGS},
        "goodput_ms": goals or None,
        "headers": sorted(target.headers.keys() - {"Authorization"}) or None,
    }
    return Run(
        target=target, samples=samples, arrivals=arrivals, goals=goals, extra=extra, settings=settings, tool=tool
    )


async def measure(run: Run, console: Console) -> tuple[LoadResult, dict[str, Any], dict[str, Any]]:
    """Warm up, load and watch the server; return what came, the figures, and the server's facts.

    Raises:
        ValueError: a warm-up request failed, or no model is known.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    try:
        proxies = not run.target.local
        async with connections(run.target.headers, run.tool.get("timeout"), proxies=proxies) as session:
            server = await _unless(stop, server_facts(session, run.target.root, run.target.api))
            run.settings["model"] = _model(run, server)
            client = Client(session, run.target.url, _dialect(run))
            await _warm_up(run, client, stop)
            async with Watch(session, run.target.root) as watch:
                with counting("requests", len(run.samples), console) as advance:
                    load = await run_load(
                        run.samples, run.arrivals, client.send, stop=stop, on_done=lambda _: advance(),
                        max_concurrency=run.tool.get("max_concurrency"),
                    )  # fmt: skip
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    figures = results(load.records, load.duration, run.goals) | watch.peaks.figures()
    figures |= {"client_cpu_share": load.cpu_share, "interrupted": load.stopped}
    figures |= {"errors": reasons(load.records), "notes": notes(load, run)}
    return load, figures, server


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Return what `work` gives, or raise KeyboardInterrupt as soon as `stop` is set."""
    job, halt = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({job, halt}, return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            raise KeyboardInterrupt
        return job.result()
    finally:
        job.cancel()
        halt.cancel()
        await asyncio.gather(job, halt, return_exceptions=True)


def notes(load: LoadResult, run: Run) -> list[str]:
    """Return what a reader must know before trusting the figures."""
    good = [each for each in load.records if each.error is None]
    made = []
    if load.cpu_share > BUSY_SHARE:
        made.append(f"the client used {load.cpu_share:.0%} of a core and may have been the limit; run several at once")
    if not all(each.counted for each in good):
        made.append(
            "the server did not count tokens; output tokens are pieces of the stream, input tokens as asked for"
        )
    if (got_in := sum(each.pieces for each in good)) and sum(each.output_tokens for each in good) > 1.2 * got_in:
        made.append("the server sends several tokens in a piece; inter-token latency is that between pieces")
    asked, got = sum(s.output_len for s in run.samples), sum(each.output_tokens for each in good)
    if len(good) == len(run.samples) and not run.tool.get("ignore_eos") and got < 0.95 * asked:
        made.append(f"answers ended early ({got} of {asked} tokens); --ignore-eos makes runs comparable")
    return made


def _dialect(run: Run) -> Dialect:
    tool = run.tool
    return Dialect(
        chat=run.target.chat,
        model=run.settings["model"],
        ignore_eos=bool(tool.get("ignore_eos")),
        temperature=tool.get("temperature"),
        extra=run.extra,
    )


def _model(run: Run, server: Mapping[str, Any]) -> str:
    named = run.tool.get("model")
    if named is None and not server.get("models"):
        raise ValueError(
            f"--base-url {run.target.root} does not tell its models; are URL and key right? else name the --model"
        )
    return str(named or server["models"][0])


async def _warm_up(run: Run, client: Client, stop: asyncio.Event) -> None:
    """Send some requests that do not count, all at once; the first failure ends the run."""
    number = run.tool.get("num_warmups", 1)
    if not number:
        return
    samples = [run.samples[i % len(run.samples)] for i in range(number)]
    done: list[RequestRecord] = []
    load = await run_load(samples, [0.0] * number, client.send, stop=stop, on_done=done.append,
                          max_concurrency=run.tool.get("max_concurrency"))  # fmt: skip
    if load.stopped:
        raise KeyboardInterrupt
    error = next((each.error for each in done if each.error is not None), None)
    if error is not None:
        raise ValueError(f"the warm-up request to {run.target.url} failed: {error}")
