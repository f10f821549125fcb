"""`moewe bench latency` and `moewe bench throughput`: a model in this terminal's hand, without HTTP.

Not a server (server/bench/online.py). Runs on the same session as `LLM`. Latency: one batch of equal prompts, again and
again. Throughput: all prompts at once. Units: seconds, tokens, bytes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...runtime.params import SamplingParams
from ...telemetry import peak_of_family
from ..commands.local import start
from ..flags.values import Settings
from ..terminal.bars import counting
from .chosen import chosen_files, chosen_samples, dataset_name
from .datasets import FIRST_ID, Prompts, Sample
from .records import RequestRecord
from .report import publish, record
from .statistics import reasons, results, summary

if TYPE_CHECKING:
    from ...runtime.session import Session

DEFAULT_ITERS, DEFAULT_WARMUPS, DEFAULT_BATCH = 10, 2, 8
LATENCY_INPUT_LEN, LATENCY_OUTPUT_LEN = 32, 128


def bench_latency(settings: Settings) -> int:
    """Time a batch of equal prompts, several times."""
    tool = {"random_input_len": LATENCY_INPUT_LEN, "random_output_len": LATENCY_OUTPUT_LEN} | settings.tool
    iters, warmups = tool.get("num_iters", DEFAULT_ITERS), tool.get("num_iters_warmup", DEFAULT_WARMUPS)
    batch = tool.get("batch_size", DEFAULT_BATCH)
    for name, value, least in (("num-iters", iters, 1), ("num-iters-warmup", warmups, 0), ("batch-size", batch, 1)):
        if value < least:
            raise ValueError(f"--{name} {value} is not allowed; use at least {least}")
    files = chosen_files(tool)
    with start(settings) as session:
        samples = chosen_samples({**tool, "num_prompts": batch}, _prompts(settings, session))
        params = _params(settings, samples)
        every: list[RequestRecord] = []
        took: list[float] = []
        stopped, earlier = False, 0
        try:
            with counting("batches", warmups + iters) as advance:
                for number in range(warmups + iters):
                    if number == warmups > 0:
                        earlier = session.num_preemptions()
                    records, duration = run_samples(session, samples, params, lambda: None)
                    if number >= warmups:
                        every += records
                        took.append(duration)
                    advance()
        except KeyboardInterrupt:
            stopped = True
        figures = results(every, sum(took), {}) | {"batches": len(took), "max_concurrent_requests": batch}
        figures["preemptions"] = session.num_preemptions() - earlier
        figures |= {f"{point}_batch_ms": 1000 * value for point, value in summary(took).items()}
        content = _content("bench latency", settings, session, tool, figures, every, batch_size=batch)
    return _finish(content, every, files, stopped)


def bench_throughput(settings: Settings) -> int:
    """Run many prompts at once and count."""
    tool = settings.tool
    dataset_name(tool)
    files = chosen_files(tool)
    with start(settings) as session:
        samples = chosen_samples(tool, _prompts(settings, session))
        stopped, records, duration = False, [RequestRecord() for _ in samples], 0.0
        began = time.perf_counter()
        try:
            with counting("prompts", len(samples)) as advance:
                records, duration = run_samples(session, samples, _params(settings, samples), advance, records)
        except KeyboardInterrupt:
            stopped, duration = True, time.perf_counter() - began
            records = [each for each in records if each.ended]
        figures = results(records, duration, {}) | {"preemptions": session.num_preemptions()}
        content = _content("bench throughput", settings, session, tool, figures, records, num_prompts=len(samples))
    return _finish(content, records, files, stopped)


def run_samples(
    session: Session,
    samples: Sequence[Sample],
    params: Sequence[SamplingParams],
    on_done: Callable[[], None],
    records: list[RequestRecord] | None = None,
) -> tuple[list[RequestRecord], float]:
    """Run all samples at once; return their records and the seconds that took.

    Args:
        on_done: called at the end of each.
        records: filled as they come, so that an interrupted caller has them; one a sample.
    """
    prompts = [s.prompt if isinstance(s.prompt, list) else session.encode(s.prompt) for s in samples]
    records = records if records is not None else [RequestRecord() for _ in samples]
    began = time.perf_counter()
    for each, prompt in zip(records, prompts, strict=True):
        each.started, each.prompt_tokens, each.counted = began, len(prompt), True
    for index, delta in session.stream(prompts, params):
        now, each = time.perf_counter(), records[index]
        if delta.token_ids:
            each.saw_piece(now)
            each.output_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            each.ended = now
            if delta.finish_reason in ("error", "abort"):
                each.error = delta.error or delta.finish_reason
            on_done()
    return records, time.perf_counter() - began


def _prompts(settings: Settings, session: Session) -> Prompts:
    vocab_size = max(session.resolved.model.vocab_size, FIRST_ID + 1)
    if session.tokenizer is not None:
        vocab_size = min(vocab_size, max(session.tokenizer.vocab_size, FIRST_ID + 1))
    seed = settings.engine.get("seed", 0)
    return Prompts(as_ids=True, vocab_size=vocab_size, tokenizer=session.tokenizer, seed=seed)


def _params(settings: Settings, samples: Sequence[Sample]) -> list[SamplingParams]:
    """Outputs have the length that was asked for, so that runs compare; greedy unless told otherwise."""
    temperature = settings.tool.get("temperature", 0.0)
    return [SamplingParams(max_tokens=s.output_len, temperature=temperature, ignore_eos=True) for s in samples]


def _content(
    name: str,
    settings: Settings,
    session: Session,
    tool: dict[str, Any],
    figures: dict[str, Any],
    records: Sequence[RequestRecord],
    **more: int,
) -> dict[str, Any]:
    figures |= {"errors": reasons(records)}
    if (peak := peak_of_family(os.getpid())) is not None:
        figures["peak_memory_bytes"] = peak
    config = session.resolved.config
    facts = {
        "topology": session.resolved.topology.long(),
        "device": config.parallel.device,
        "dtype": session.resolved.model.dtype,
        "max_num_seqs": config.schedule.max_num_seqs,
        "max_num_batched_tokens": config.schedule.max_num_batched_tokens,
        "max_model_len": session.max_model_len,
    }
    shown = {key: value for key, value in tool.items() if key not in ("output_json", "plot", "num_prompts")}
    asked = {key: value for key, value in settings.engine.items() if key not in facts}
    return record(name, {**asked, **shown, **more}, facts, figures)


def _finish(content: dict[str, Any], records: Sequence[RequestRecord], files: tuple[Any, Any], stopped: bool) -> int:
    title = f"{content['settings']['model']}, {content['server']['topology']}"
    interrupted = "the figures are of what had ended" if stopped else None
    return publish(content, records, files, title=title, interrupted=interrupted)
