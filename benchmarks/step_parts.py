"""Where does a decode step of the real engine go: its native calls, and each part of the Python between them?

Engine process, rank and native kernels are the real ones, on bench-1b; marks are put around their functions when the
engine process starts (its module is this file). A part is the wall time inside its functions, summed over a step; the
table shows the median over steps in which all requests decode. Engine and rank are two threads: parts of the engine run
while the rank is in native code, so not all of them lengthen a step. What does is `between`: the wall time of a step
less that of its native calls, whoever spends it. `counting` is telemetry on the rank:
bytes, operations, rows of experts, memory, and their encoding now and then; its goal is 1 % of a step. Five looks at
the clock, which have no mark, take less than a mark.

    python benchmarks/step_parts.py --requests 1 32
    python benchmarks/step_parts.py --threads 1 --quantization int8
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import records
from bench_1b import checkpoint, prompts

FILE_VARIABLE, CPU_VARIABLE = "STEP_PARTS_FILE", "STEP_PARTS_CPU"
PROMPT_TOKENS = 64
SETTLED = 12  # steps at both ends of a run that are left out: prompts, and sequences that end before others
NATIVE = ("native layers", "native head", "native rows")
RANK = ("read message", "apply plan, rows", "inputs", "around layers", "around head", "judge", "book rows",
        "counting", "the rest of run", "send result")  # fmt: skip
ENGINE = ("plan", "send plan", "read message", "read result", "book", "text", "tell client")


class Marks:
    """Names, starts and ends of what ran, a list for each thread."""

    def __init__(self) -> None:
        self._clock = time.thread_time_ns if os.environ.get(CPU_VARIABLE) else time.perf_counter_ns
        self._events: list[tuple[str, int, int, int, int]] = []
        self._inner: dict[int, list[int]] = defaultdict(list)

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call` with a mark; what marks inside of it take is not its own."""

        def marked(*args: Any, **kwargs: Any) -> Any:
            thread = threading.get_ident()
            inner = self._inner[thread]
            inner.append(0)
            start, began = time.perf_counter_ns(), self._clock()
            try:
                return call(*args, **kwargs)
            finally:
                spent, end = self._clock() - began, time.perf_counter_ns()
                taken = inner.pop()
                if inner:
                    inner[-1] += spent
                self._events.append((name, thread, start, end, spent - taken))

        return marked

    def patch(self, owner: Any, name: str, part: str) -> None:
        """Mark a method of a class."""
        setattr(owner, name, self.around(part, getattr(owner, name)))

    def write(self) -> None:
        """Leave everything in the file that the environment names."""
        Path(os.environ[FILE_VARIABLE]).write_text(json.dumps(self._events))


def mark_engine(marks: Marks) -> None:
    """Put marks into this process, before anything of it runs."""
    from moewe.models.decoder import Decoder
    from moewe.models.native_layers import NativeLayers
    from moewe.models.pass_counts import PassCounter
    from moewe.native.library import load
    from moewe.runtime import worker_main
    from moewe.runtime.counter_reports import CounterReports
    from moewe.runtime.engine import Engine
    from moewe.runtime.engine_main import EngineLoop
    from moewe.runtime.processes.channel import Channel
    from moewe.runtime.processes.workers import Workers
    from moewe.runtime.ranks.batch import WorkerBatch
    from moewe.runtime.ranks.step_inputs import InputBuilder
    from moewe.runtime.scheduler import Scheduler
    from moewe.runtime.worker import Worker

    for owner, name, part in (
        (Scheduler, "schedule", "plan"), (Workers, "submit", "send plan"), (Workers, "_read", "read result"),
        (Scheduler, "apply", "book"), (Engine, "_deltas", "text"), (EngineLoop, "_emit", "tell client"),
        (Channel, "_parse", "read message"), (WorkerBatch, "apply", "apply plan, rows"),
        (WorkerBatch, "rows", "apply plan, rows"), (InputBuilder, "of", "inputs"),
        (Decoder, "forward", "around layers"), (Decoder, "step_logits", "around head"), (Worker, "_judge", "judge"),
        (WorkerBatch, "commit", "book rows"), (Worker, "run", "the rest of run"),
        (worker_main, "_send_alive", "send result"),
        (PassCounter, "count", "counting"), (PassCounter, "count_logits", "counting"),
        (CounterReports, "after_step", "counting"),
    ):  # fmt: skip
        marks.patch(owner, name, part)
    library = load()
    assert library is not None, "this benchmark needs native kernels"
    library.moewe_linear = marks.around("native head", library.moewe_linear)
    library.moewe_scan_rows = marks.around("native rows", library.moewe_scan_rows)
    library.moewe_gather_rows = marks.around("native rows", library.moewe_gather_rows)
    prepare = NativeLayers.__init__

    def prepared(self: NativeLayers, *args: Any, **kwargs: Any) -> None:
        prepare(self, *args, **kwargs)
        self._run_layers = marks.around("native layers", self._run_layers)

    NativeLayers.__init__ = prepared  # type: ignore[method-assign]


def be_engine() -> None:
    """Be an engine process that keeps a record of itself."""
    from moewe.runtime import engine_main
    from moewe.runtime.messages import ToEngine
    from moewe.runtime.processes.child import enter_child, freeze_heap, log_as
    from moewe.runtime.processes.launch import EngineStart

    client: Any = enter_child(EngineStart | ToEngine)
    start = client.receive()
    log_as("engine")
    marks = Marks()
    mark_engine(marks)
    code = engine_main.run_engine(client, start, on_ready=freeze_heap)
    marks.write()
    sys.stderr.flush()
    os._exit(code)


def measure(args: argparse.Namespace, requests: int) -> dict[str, dict[str, float]]:
    """Run `requests` together in an engine of their own; return the summary of each part, in milliseconds."""
    import moewe.runtime.launcher
    import moewe.runtime.replicas
    from moewe.models.demo import ensure_demo_checkpoint
    from moewe.runtime.config import CacheOptions, EngineConfig, ModelOptions, ParallelOptions, ScheduleOptions
    from moewe.runtime.params import SamplingParams
    from moewe.runtime.prompts import packed

    moewe.runtime.launcher.ENGINE_MODULE = "step_parts"
    folder = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    config = EngineConfig(
        model=ModelOptions(
            model="bench-1b",
            path=str(args.dir),
            tokenizer=str(ensure_demo_checkpoint()),  # bench-1b has none; this one has as many tokens
            max_model_len=1024,
            quantization=args.quantization,
        ),
        parallel=ParallelOptions(threads=args.threads),
        cache=CacheOptions(num_blocks=2048),
        schedule=ScheduleOptions(max_num_seqs=64),
    )
    with tempfile.NamedTemporaryFile() as file:
        os.environ[FILE_VARIABLE] = file.name
        replicas = moewe.runtime.replicas.ReplicaSet.start(config)
        replicas.wait_ready()
        params = SamplingParams(max_tokens=args.steps, temperature=0, ignore_eos=True)
        for number, prompt in enumerate(prompts(requests, PROMPT_TOKENS)):
            replicas.submit(f"r{number}", packed(prompt), params)
        running, num_tokens = requests, 0
        while running:
            for delta in replicas.poll(None):
                num_tokens += len(delta.token_ids)
                running -= delta.finish_reason is not None
        replicas.close()
        if num_tokens != requests * args.steps:
            raise SystemExit(f"{num_tokens} tokens, not {requests * args.steps}")
        return summaries(json.loads(Path(file.name).read_text()), args.steps)


def summaries(events: list[tuple[str, int, int, int, int]], steps: int) -> dict[str, dict[str, float]]:
    """Return what each part, and what is between native calls, takes of a step: milliseconds over steps."""
    passes = [(start, end, thread) for name, thread, start, end, _ in events if name == "native layers"][-steps:]
    starts = np.array([start for start, _, _ in passes])
    spent: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(len(passes)))
    for name, thread, start, _, own in events:
        step = int(np.searchsorted(starts, start, side="right")) - 1
        if step >= 0:
            side = "native" if name in NATIVE else "rank" if thread == passes[0][2] else "engine"
            spent[f"{side}: {name}"][step] += own / 1e6
    native = np.zeros(len(passes))
    for name, _, start, end, _ in events:
        if name in NATIVE and start >= starts[0]:
            native[np.searchsorted(starts, start, side="right") - 1] += (end - start) / 1e6
    whole = np.diff(starts) / 1e6
    spent["step"] = whole
    spent["between"] = whole - native[:-1]
    for side in ("rank", "engine"):
        spent[f"{side}, all parts"] = np.sum([v for name, v in spent.items() if name.startswith(f"{side}:")], axis=0)
    found = {name: records.summary(values[SETTLED : steps - SETTLED].tolist()) for name, values in spent.items()}
    # Counters are encoded now and then, which a median would not show.
    counting, whole = (spent[name][SETTLED : steps - SETTLED].mean() for name in ("rank: counting", "step"))
    return found | {"counting, mean": {"milliseconds": float(counting), "share_of_step": float(counting / whole)}}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "moewe" / "bench-1b"
    parser.add_argument("--dir", type=Path, default=cache, help="where bench-1b is or will be made (2.7 GB)")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--cpu", action="store_true", help="CPU time of parts, not wall time: where other programs run")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.cpu:
        os.environ[CPU_VARIABLE] = "1"
    checkpoint(args.dir)
    found = {str(requests): measure(args, requests) for requests in args.requests}
    names = ["step", *(f"native: {name}" for name in NATIVE), "between"]
    for side, parts in (("rank", RANK), ("engine", ENGINE)):
        names += [f"{side}, all parts", *(f"{side}: {part}" for part in parts)]
    print(f"{'ms of a step, at requests:':<28}" + "".join(f"{requests:>10}" for requests in found))
    for name in names:
        print(f"{name:<28}" + "".join(f"{parts[name]['median']:>10.3f}" for parts in found.values() if name in parts))
    for requests, parts in found.items():
        mean = parts["counting, mean"]
        print(
            f"counting at {requests}: {mean['milliseconds']:.3f} ms, {mean['share_of_step']:.2%} of a step on average "
            "(goal: at most 1 %)"
        )
    records.write("step_parts", found, args.out)


if __name__ == "__main__":
    be_engine() if FILE_VARIABLE in os.environ else main()
