"""How long does planning take? `schedule` and `apply` alone, with workers that do nothing but answer.

Not a test (tests/runtime/test_scheduler*.py) and no model: 64 ranks with 256 sequences each by default.
Units: milliseconds a step. Prints a table and one line of JSON; asserts once that every sequence got its tokens.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import deque

import numpy as np

from moewe.runtime.params import SamplingParams
from moewe.runtime.plan import FINISH_LENGTH, RankPlan, RankResult, StepPlan, StepResult, pack, unpack
from moewe.runtime.scheduler import GroupLimits, Request, Scheduler, SchedulerConfig


class EchoRank:
    """Holds what a worker must hold to answer a step, and answers token 1."""

    def __init__(self, num_slots: int) -> None:
        self.sequence_ids = np.full(num_slots, -1, np.int64)
        self.left = np.zeros(num_slots, np.int64)  # tokens to go
        self.decoding = np.zeros(num_slots, np.bool_)

    def run(self, step: int, plan: RankPlan) -> RankResult:
        self.decoding[unpack(plan.released)] = False
        for new in plan.admitted:
            self.sequence_ids[new.slot] = new.sequence_id
            self.left[new.slot] = new.max_length - len(new.tokens) // 4
        sampling = self.decoding.copy()
        sampling[[chunk.slot for chunk in plan.chunks if chunk.samples]] = True
        slots = np.flatnonzero(sampling)
        self.left[slots] -= 1
        flags = np.where(self.left[slots] == 0, FINISH_LENGTH, 0)
        self.decoding = sampling & (self.left > 0)
        ids = self.sequence_ids[slots]
        return RankResult(
            step=step,
            slots=pack(slots),
            sequence_ids=pack(ids, "<i8"),
            tokens=pack(np.ones(len(slots))),
            flags=pack(flags, "u1"),
        )


class Bench:
    """One engine's planning at depth two; collects the time of every `schedule` and `apply`."""

    def __init__(self, ranks: int, slots: int) -> None:
        config = SchedulerConfig(
            num_ranks=ranks,
            groups=(GroupLimits(num_blocks=slots * 40),),
            block_size=16,
            max_model_len=32768,
            max_num_seqs=slots,
            max_num_batched_tokens=slots + 256,
            max_queued_requests=10**6,
        )
        self.scheduler = Scheduler(config)
        self.ranks = [EchoRank(slots) for _ in range(ranks)]
        self.in_flight: deque[StepPlan] = deque()
        self.requests: list[Request] = []
        self.rng = np.random.default_rng(0)
        self.schedule_ms: list[float] = []
        self.apply_ms: list[float] = []
        self.changes: list[int] = []

    def add(self, count: int, least: int, most: int) -> None:
        for _ in range(count):
            prompt = np.ones(int(self.rng.integers(1, 64)), np.int32)
            params = SamplingParams(max_tokens=int(self.rng.integers(least, most)))
            name = f"r{len(self.requests)}"
            self.requests.append(Request(name, prompt, params, arrival=float(len(self.requests))))
            self.scheduler.add(self.requests[-1])

    def step(self) -> None:
        start = time.perf_counter()
        plan = self.scheduler.schedule()
        self.schedule_ms.append((time.perf_counter() - start) * 1e3)
        if plan is not None:
            self.in_flight.append(plan)
            self.changes.append(sum(len(r.admitted) + len(r.released) // 4 + len(r.chunks) for r in plan.ranks))
        if self.in_flight and (plan is None or len(self.in_flight) == 2):
            oldest = self.in_flight.popleft()
            step = oldest.header.step
            result = StepResult(
                step=step,
                ranks=tuple(rank.run(step, part) for rank, part in zip(self.ranks, oldest.ranks, strict=True)),
            )
            start = time.perf_counter()
            self.scheduler.apply(result)
            self.apply_ms.append((time.perf_counter() - start) * 1e3)

    def figures(self, name: str) -> dict[str, object]:
        planned, applied = np.array(self.schedule_ms), np.array(self.apply_ms)
        return {
            "scenario": name,
            "steps": len(planned),
            "schedule_ms_median": round(float(np.median(planned)), 3),
            "schedule_ms_p99": round(float(np.percentile(planned, 99)), 3),
            "apply_ms_median": round(float(np.median(applied)), 3),
            "changes_median": float(np.median(self.changes)),
        }

    def forget_times(self) -> None:
        self.schedule_ms, self.apply_ms, self.changes = [], [], []


def fill(bench: Bench, total: int, least: int, most: int) -> None:
    bench.add(total, least, most)
    while bench.scheduler.num_waiting or not all(request.generated for request in bench.requests):
        bench.step()
    bench.forget_times()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--seqs", type=int, default=256, help="sequences a rank")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    total = options.ranks * options.seqs

    steady = Bench(options.ranks, options.seqs)
    fill(steady, total, options.steps + 100, options.steps + 164)
    for _ in range(options.steps):
        steady.step()
    records = [steady.figures("steady decode")]

    churn = Bench(options.ranks, options.seqs)
    fill(churn, total, 20, 400)
    for _ in range(options.steps):
        if churn.scheduler.num_waiting == 0:
            churn.add(total - churn.scheduler.num_running, 20, 400)
        churn.step()
    records.append(churn.figures("arrivals and endings"))
    while churn.scheduler.has_work:
        churn.step()
    assert all(len(request.generated) == request.params.max_tokens for request in churn.requests)
    churn.scheduler.check_invariants()

    for record in records:
        print("  ".join(f"{key} {value}" for key, value in record.items()))
    shape = {"ranks": options.ranks, "sequences_per_rank": options.seqs}
    print(json.dumps({"bench": "scheduler", "machine": platform.machine(), "shape": shape, "records": records}))


if __name__ == "__main__":
    main()
