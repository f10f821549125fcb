"""How long does an engine take to plan for many ranks? Scheduler, messages and books are real, and nothing is computed.

Not a test and no model: 64 ranks with 256 sequences each by default, two steps in flight. Engine time of a step is

    schedule    Scheduler.schedule
    encode      the msgspec bytes of every rank's plan, as a channel makes them
    decode      the msgspec bytes of every rank's result
    book        Scheduler.apply: lengths, ends, tokens, freed blocks

and not what is done for clients: text, deltas, sockets. Requests that come are timed beside it, as `add`: their
parameters are made and checked, and `Scheduler.add`. Rank 0 is a real batch of the runtime (runtime/ranks/batch.py);
its side of a step is timed apart; the others only answer.

    python benchmarks/planner_scale.py
    python benchmarks/planner_scale.py --soak-steps 100000

Units: milliseconds a step, MiB. Asserts that no request lost a token.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import records

from moewe.runtime.messages import FromWorker, RunStep, StepDone, ToWorker
from moewe.runtime.params import SamplingParams
from moewe.runtime.plan import FINISH_LENGTH, FINISH_STOP, RankPlan, RankResult, StepHeader, StepResult, pack, unpack
from moewe.runtime.ranks.batch import WorkerBatch
from moewe.runtime.scheduler import GroupLimits, Request, Scheduler, SchedulerConfig

BLOCK_SIZE, MAX_MODEL_LEN, MOST_TOKENS = 16, 32768, 1920
END_TOKEN, TOKEN = 2, 1
# Of sequences that end, this part does so with an end token, which no plan can know of.
SURPRISES = 0.5
# Part of the sequences that end in a step; as many come. The goal for 1 % that start or end can be read both ways.
SCENARIOS = {"steady": 0.0, "1 % come or go": 0.005, "1 % come and 1 % go": 0.01, "5 % come and 5 % go": 0.05}
SOAK_CHURN = 0.01
SOAK_CHECKS = 16  # of so many requests that end in a soak the tokens of one are looked at
PARTS = ("schedule", "encode", "decode", "book")
# Median and 99th percentile of engine time.
GOALS = {"steady": (2.0, 4.0), "1 % come or go": (4.0, None), "1 % come and 1 % go": (4.0, None)}


class RealRank:
    """What a rank's process does in a step but for the model: read the plan, apply it, make rows, book, answer."""

    def __init__(self, slots: int, ends: float, rng: np.random.Generator) -> None:
        self._batch = WorkerBatch(num_slots=slots, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE)
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToWorker)
        self._encoder = msgspec.msgpack.Encoder()
        self._ends, self._rng = ends, rng

    def run(self, message: bytes) -> bytes:
        """Return the encoded result of an encoded plan."""
        step = self._decoder.decode(message)
        self._batch.apply(step.plan)
        rows = self._batch.rows(step.plan.chunks, step.plan.held)
        slots = rows.sample_slots
        tokens = np.where(self._rng.random(slots.size) < self._ends, END_TOKEN, TOKEN)
        kept = self._batch.commit(rows, tokens)
        result = RankResult(
            step=step.header.step,
            slots=pack(slots),
            sequence_ids=pack(self._batch.sequence_ids[slots], "<i8"),
            tokens=pack(tokens),
            flags=pack(kept.flags, "u1") if kept.flags.any() else b"",
            num_rows=rows.num_rows,
        )
        return self._encoder.encode(StepDone(rank=0, result=result))


class EchoRanks:
    """All other ranks at once: they hold what they must to answer, and answer at little cost."""

    def __init__(self, ranks: int, slots: int, ends: float, rng: np.random.Generator) -> None:
        self._ids = np.full((ranks, slots), -1, np.int64)
        self._left = np.zeros((ranks, slots), np.int64)  # tokens to go
        self._decoding = np.zeros((ranks, slots), np.bool_)
        self._encoder = msgspec.msgpack.Encoder()
        self._ends, self._rng = ends, rng

    def run(self, header: StepHeader, plans: tuple[RankPlan, ...]) -> list[bytes]:
        """Return the encoded result of each rank's plan; rank numbers count from 1."""
        for rank, plan in enumerate(plans):
            if plan.released:
                self._decoding[rank, unpack(plan.released)] = False
            for new in plan.admitted:
                self._ids[rank, new.slot] = new.sequence_id
                self._left[rank, new.slot] = new.max_length - len(new.tokens) // 4
        sampling = self._decoding.copy()
        for rank, plan in enumerate(plans):
            if plan.chunks:
                sampling[rank, [chunk.slot for chunk in plan.chunks if chunk.samples]] = True
        self._left -= sampling
        stops = self._rng.random(sampling.shape) < self._ends if self._ends else np.zeros_like(sampling)
        flags = np.where(stops, FINISH_STOP, np.where(self._left == 0, FINISH_LENGTH, 0))
        self._decoding = sampling & (flags == 0)
        rows, slots = np.nonzero(sampling)
        starts = np.searchsorted(rows, np.arange(len(plans) + 1)).tolist()
        columns = (
            pack(slots), pack(self._ids[rows, slots], "<i8"),
            pack(np.where(stops[rows, slots], END_TOKEN, TOKEN)), pack(flags[rows, slots], "u1"),
        )  # fmt: skip
        return [self._answer(header, i, columns, starts[i], starts[i + 1]) for i in range(len(plans))]

    def _answer(self, header: StepHeader, index: int, columns: tuple[bytes, ...], start: int, end: int) -> bytes:
        slots, ids, tokens, flags = columns
        own = flags[start:end]
        result = RankResult(
            step=header.step,
            slots=slots[4 * start : 4 * end],
            sequence_ids=ids[8 * start : 8 * end],
            tokens=tokens[4 * start : 4 * end],
            flags=own if any(own) else b"",
            num_rows=end - start,
        )
        return self._encoder.encode(StepDone(rank=index + 1, result=result))


class Bench:
    """One engine's planning, two steps ahead.

    Args:
        ranks, slots: of the group, and sequences of a rank.
        churn: part of the running sequences that end in each step; as many come.
        most_steps: that are timed.
        clock: seconds.
        check_every: of so many requests that end the tokens of one are counted.
    """

    def __init__(
        self,
        ranks: int,
        slots: int,
        churn: float,
        most_steps: int,
        clock: Callable[[], float] = time.perf_counter,
        check_every: int = 1,
    ) -> None:
        config = SchedulerConfig(
            num_ranks=ranks,
            groups=(GroupLimits(num_blocks=slots * 128),),
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=slots,
            max_num_batched_tokens=8192,
            max_queued_requests=10**6,
            eos_token_ids=(END_TOKEN,),
        )
        self.scheduler, self.total = Scheduler(config), ranks * slots
        self._clock, self._check_every = clock, check_every
        self._churn, self._rng = churn, np.random.default_rng(0)
        self._real = RealRank(slots, churn * SURPRISES, np.random.default_rng(1))
        self._echoes = EchoRanks(ranks - 1, slots, churn * SURPRISES, np.random.default_rng(2))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromWorker)
        self._in_flight: deque[tuple[StepHeader, tuple[RankPlan, ...], bytes]] = deque()
        self._live: dict[str, Request] = {}
        self._num_requests = self.num_ended = self.num_tokens = 0
        self.times = {name: np.zeros(most_steps) for name in (*PARTS, "add", "rank")}
        self.changes = np.zeros(most_steps, np.int64)  # sequences that come or go
        self._step = 0
        self._last_rank_s = 0.0

    def fill(self) -> None:
        """Let every slot be taken and decode."""
        self._add(self._asked(self.total))
        while self.scheduler.num_waiting or self._step < 4:
            self.step(timed=False)
            self._step += 1
        self._step = 0

    def step(self, *, timed: bool = True) -> None:
        """Plan a step, and book the one before."""
        clock = self._clock
        missing = self.total - self.scheduler.num_running - self.scheduler.num_waiting
        asked = self._asked(missing) if missing > 0 and self._churn else []
        started = clock()
        self._add(asked)
        came = clock()
        plan = self.scheduler.schedule()
        planned = clock()
        assert plan is not None
        encode = self._encoder.encode
        messages = [encode(RunStep(header=plan.header, plan=own)) for own in plan.ranks]
        encoded = clock()
        self._in_flight.append((plan.header, plan.ranks, messages[0]))
        decoded = booked = answered = clock()
        if len(self._in_flight) == 2:
            header, plans, message = self._in_flight.popleft()
            at = clock()
            first = self._real.run(message)
            self._last_rank_s = clock() - at
            answers = [first, *self._echoes.run(header, plans[1:])]
            answered = clock()
            decode = self._decoder.decode
            results = tuple([decode(answer).result for answer in answers])
            decoded = clock()
            updates = self.scheduler.apply(StepResult(step=header.step, ranks=results))
            booked = clock()
            self._account(updates)
        if timed:
            found = (planned - came, encoded - planned, decoded - answered, booked - decoded, came - started,
                     self._last_rank_s)  # fmt: skip
            for name, seconds in zip((*PARTS, "add", "rank"), found, strict=True):
                self.times[name][self._step] = seconds * 1e3
            self.changes[self._step] = sum(len(own.admitted) + len(own.released) // 4 for own in plan.ranks)
            self._step += 1

    def _asked(self, count: int) -> list[tuple[str, np.ndarray, int]]:
        """Return name, prompt and length of `count` requests; their lengths end `churn` of all in a step."""
        known = self._churn * (1 - SURPRISES)
        lengths = self._rng.geometric(known, count) if known else np.full(count, MOST_TOKENS)
        prompts = [np.ones(size, np.int32) for size in self._rng.integers(1, 64, count).tolist()]
        first, self._num_requests = self._num_requests, self._num_requests + count
        names = [f"r{number}" for number in range(first, first + count)]
        return list(zip(names, prompts, lengths.clip(max=MOST_TOKENS).tolist(), strict=True))

    def _add(self, asked: list[tuple[str, np.ndarray, int]]) -> None:
        """Let requests come that are as `_asked` returns them."""
        for name, prompt, length in asked:
            request = Request(name, prompt, SamplingParams(max_tokens=length), arrival=float(name[1:]))
            self._live[name] = request
            self.scheduler.add(request)

    def _account(self, updates: Any) -> None:
        """Count tokens, and check requests that ended; what makes updates of those that go on is not looked at."""
        self.num_tokens += len(updates)
        for update in getattr(updates, "single", updates):
            if update.finish_reason is not None:
                request = self._live.pop(update.request.request_id)
                self.num_ended += 1
                if self.num_ended % self._check_every:
                    continue
                generated, most = request.generated, request.params.max_tokens
                whole = len(generated) == most if update.finish_reason == "length" else generated[-1] == END_TOKEN
                assert whole, f"{request.request_id} ended after {len(generated)} tokens of {most}"

    def figures(self) -> dict[str, Any]:
        """Return medians and 99th percentiles over the timed steps."""
        times = {name: values[: self._step] for name, values in self.times.items()}
        times["engine"] = sum((times[name] for name in PARTS), np.zeros(self._step))
        times["engine and add"] = times["engine"] + times["add"]
        table = {
            name: {"median_ms": round(float(np.median(own)), 3), "p99_ms": round(float(np.percentile(own, 99)), 3)}
            for name, own in times.items()
        }
        return {"steps": self._step, "changes_median": float(np.median(self.changes[: self._step])), "times": table}


def resident_mib() -> float:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(name: str, ranks: int, slots: int, churn: float, steps: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Time `steps` steps of one scenario, print them, and return the figures."""
    bench = Bench(ranks, slots, churn, steps, clock)
    bench.fill()
    for _ in range(steps):
        bench.step()
    bench.scheduler.check_invariants()
    found = bench.figures()
    print(f"{name}: {ranks} ranks x {slots} sequences, {steps} steps, {found['changes_median']:.0f} come or go in each")
    for part, own in found["times"].items():
        print(f"  {part:15} median {own['median_ms']:7.3f} ms   p99 {own['p99_ms']:7.3f} ms")
    median, p99 = GOALS.get(name, (None, None))
    engine = found["times"]["engine"]
    if median is not None:
        reached = engine["median_ms"] <= median and (p99 is None or engine["p99_ms"] <= p99)
        print(
            f"  goal: median {median} ms"
            + (f", p99 {p99} ms" if p99 else "")
            + f": {'reached' if reached else 'MISSED'}"
        )
        found["goal"] = {"median_ms": median, "p99_ms": p99, "reached": reached}
    return found


def soak(ranks: int, slots: int, steps: int) -> dict[str, Any]:
    """Run `steps` steps in which 1 % come and 1 % go, and return what memory did after the first tenth of them."""
    bench = Bench(ranks, slots, SOAK_CHURN, 1, check_every=SOAK_CHECKS)
    bench.fill()
    seen: list[float] = []
    for number in range(steps):
        bench.step(timed=False)
        if (number + 1) % max(1, steps // 100) == 0:
            seen.append(round(resident_mib(), 1))
    bench.scheduler.check_invariants()
    settled = seen[len(seen) // 10 :]
    growth = settled[-1] - settled[0]
    a_sample = max(1, steps // 100)
    slope = float(np.polyfit(np.arange(len(settled)) * a_sample, settled, 1)[0]) * 1e5 if len(settled) > 1 else 0.0
    print(
        f"soak: {ranks} ranks x {slots} sequences, {steps} steps, {bench.num_ended} requests ended, "
        f"{bench.num_tokens} tokens; resident memory {settled[0]:.1f} MiB after a tenth, {settled[-1]:.1f} MiB at the "
        f"end ({growth:+.1f}), most {max(seen):.1f}; slope {slope:+.2f} MiB in 100,000 steps"
    )
    return {
        "steps": steps,
        "ended": bench.num_ended,
        "tokens": bench.num_tokens,
        "growth_mib": growth,
        "slope_mib_per_100000_steps": slope,
        "mib": seen,
    }


def main() -> None:
    """Measure, print, write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--seqs", type=int, default=256, help="sequences a rank")
    parser.add_argument("--steps", type=int, default=500, help="timed steps of each scenario, at most 1500")
    parser.add_argument("--soak-steps", type=int, default=2000, help="steps over which memory is watched; 0 for none")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="time of this thread on a CPU instead of the clock's: a hint on a busy machine",
    )
    parser.add_argument("--only", choices=SCENARIOS, help="one scenario")
    parser.add_argument("--out", type=Path, help="JSON record (default: benchmarks/out/planner_scale.json)")
    options = parser.parse_args()
    if not 1 <= options.steps <= 1500 or options.ranks < 2:
        parser.error("--steps takes 1 to 1500, --ranks 2 or more")
    gc.collect()
    gc.freeze()  # as an engine does when it is ready
    shape = (options.ranks, options.seqs)
    results: dict[str, Any] = {"ranks": shape[0], "sequences_per_rank": shape[1]}
    clock = time.thread_time if options.cpu_time else time.perf_counter
    results["clock"] = "CPU time of the thread" if options.cpu_time else "wall"
    for name, churn in SCENARIOS.items():
        if options.only in (None, name):
            results[name] = measure(name, *shape, churn, options.steps, clock)
    if options.soak_steps:
        results["soak"] = soak(*shape, options.soak_steps)
    records.write("planner_scale", results, options.out)


if __name__ == "__main__":
    main()
