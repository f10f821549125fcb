"""A step trace as JSON in the format of Chrome's tracing, which Perfetto and chrome://tracing read.

One process a replica, one thread for its engine and one for each rank. Of a rank: what it waited for the plan, and each
step with its parts inside. (The format: Google's "Trace Event Format", complete events, ph X.)
Units: nanoseconds of CLOCK_MONOTONIC become microseconds since the first event, with three decimals, so none is lost.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...runtime.messages import Traced
from ...runtime.plan import unpack
from ...runtime.step_recorder import ENGINE_PARTS
from ...telemetry.step_marks import NO_LAYER, PARTS, ReadMarks, unpack_marks

ENGINE, STEP, HOST, LAYER, EXCHANGE, WAITING = CATEGORIES = ("engine", "step", "host", "layer", "exchange", "waiting")
WAIT_FOR_PLAN = "wait for plan"
ENGINE_THREAD = 0  # ranks have the threads after it
# What a part is called in the file, and its category.
PART_NAMES = {part: "wait for ranks" if part == "wait" else part for part in PARTS}
_CATEGORY = {
    **dict.fromkeys(PARTS, LAYER),
    **dict.fromkeys(("inputs", "sampling", "results"), HOST),
    **dict.fromkeys(("dispatch", "combine"), EXCHANGE),
    "wait": WAITING,
}


@dataclass(frozen=True, kw_only=True)
class TraceFacts:
    """What the file says of the server."""

    version: str
    model: str
    topology: str


@dataclass(frozen=True, kw_only=True)
class _Event:
    """Something that took its time; `more` are further arguments as JSON, each with a comma before it."""

    name: str
    category: str
    thread: int
    begin: int
    end: int
    step: int
    more: str = ""


def chrome_trace(traces: Sequence[Traced | None], num_steps: int, ended: str, facts: TraceFacts) -> bytes:
    """Return the file.

    Args:
        traces: of each replica; None where one was lost.
        num_steps: as asked.
        ended: why it ended early; empty when it did not.
        facts: of the server.
    """
    events = [list(_events(trace)) if trace is not None else [] for trace in traces]
    first = min((event.begin for own in events for event in own), default=0)
    lines = [line for replica, trace in enumerate(traces) for line in _names(replica, trace)]
    for replica, own in enumerate(events):
        lines += [_line(event, replica, first) for event in own]
    about = {
        "version": facts.version,
        "model": facts.model,
        "topology": facts.topology,
        "steps_asked": num_steps,
        "steps": [len(trace.steps) if trace is not None else 0 for trace in traces],
        "ended_early": _reason(traces, ended),
        "clock": "CLOCK_MONOTONIC",
        "began_ns": first,
    }
    head = f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n'
    return (head + ",\n".join(lines) + "\n]}\n").encode()


def _reason(traces: Sequence[Traced | None], ended: str) -> str:
    """Return why not all is there, in one line; empty when all is."""
    reasons = [ended] if ended else []
    for replica, trace in enumerate(traces):
        if trace is None:
            reasons.append(f"replica {replica} gave no trace")
        elif trace.is_full:
            reasons.append(f"replica {replica} had as many marks as a trace may hold")
    return "; ".join(reasons)


def _names(replica: int, trace: Traced | None) -> Iterator[str]:
    num_ranks = len(trace.steps[0].rows) if trace is not None and trace.steps else 0
    names = {ENGINE_THREAD: "engine", **{1 + rank: f"rank {rank}" for rank in range(num_ranks)}}
    yield _named("process_name", replica, ENGINE_THREAD, {"name": f"replica {replica}"})
    for thread, name in names.items():
        yield _named("thread_name", replica, thread, {"name": name})
        yield _named("thread_sort_index", replica, thread, {"sort_index": thread})


def _named(kind: str, replica: int, thread: int, args: dict[str, Any]) -> str:
    return json.dumps({"name": kind, "ph": "M", "pid": replica, "tid": thread, "args": args})


def _events(trace: Traced) -> Iterator[_Event]:
    for part, step, begin, end in unpack(trace.engine, "<i8").reshape(-1, 4).tolist():
        yield _Event(name=ENGINE_PARTS[part], category=ENGINE, thread=ENGINE_THREAD, begin=begin, end=end, step=step)
    ended: dict[int, int] = {}  # by rank, when its last step did
    for step in trace.steps:
        for rank, packed in enumerate(step.marks):
            if not packed:
                continue
            marks, thread = unpack_marks(packed), 1 + rank
            since = max(marks.waited_from, ended.get(rank, 0))
            if marks.waited_from and since < marks.began:
                yield _Event(name=WAIT_FOR_PLAN, category=WAITING, thread=thread, begin=since, end=marks.began,
                             step=step.step)  # fmt: skip
            ended[rank] = int(marks.ends[-1]) if len(marks.ends) else marks.began
            yield _Event(
                name=f"{step.phase} step", category=STEP, thread=thread, begin=marks.began, end=ended[rank],
                step=step.step, more=f',"phase":{json.dumps(step.phase)},"rows":{step.rows[rank]}',
            )  # fmt: skip
            yield from _parts(marks, thread, step.step)


def _parts(marks: ReadMarks, thread: int, step: int) -> Iterator[_Event]:
    begin = marks.began
    for end, part, layer in zip(marks.ends.tolist(), marks.parts.tolist(), marks.layers.tolist(), strict=True):
        name = PARTS[part]
        yield _Event(
            name=PART_NAMES[name], category=_CATEGORY[name], thread=thread, begin=begin, end=end, step=step,
            more="" if layer == NO_LAYER else f',"layer":{layer}',
        )  # fmt: skip
        begin = end


def _line(event: _Event, replica: int, first: int) -> str:
    return (
        f'{{"name":"{event.name}","cat":"{event.category}","ph":"X","pid":{replica},"tid":{event.thread},'
        f'"ts":{_us(event.begin - first)},"dur":{_us(event.end - event.begin)},'
        f'"args":{{"step":{event.step}{event.more}}}}}'
    )


def _us(nanoseconds: int) -> str:
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"
