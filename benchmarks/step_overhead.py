"""How much of a decode step is Python, outside torch? 16 requests, 24 layers, 32 experts top-8, as bench-1b.

Widths are tiny and the weights fp32, so that torch takes little and the difference of two numbers means something:
outside torch = wall time of a step (nothing attached) - time inside calls of torch in the step after it (each timed by
a TorchFunctionMode, less what timing an empty call shows); the median over many such pairs, as the machine drifts.
torch.profiler will not do: it also slows what an operation calls inside, so its sum can exceed the wall time.

    python benchmarks/step_overhead.py
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import records
import torch
from torch.overrides import TorchFunctionMode

from moewe.models.families import load_config
from moewe.moe.wide_ep.exchanges.local import LocalExchange
from moewe.moe.wide_ep.placement import linear_placement
from moewe.runtime.config import CacheOptions, EngineConfig, ModelOptions, ScheduleOptions
from moewe.runtime.params import SamplingParams
from moewe.runtime.plan import StepPlan, StepResult
from moewe.runtime.scheduler import GroupLimits, Request, Scheduler, SchedulerConfig
from moewe.runtime.worker import Worker
from moewe.telemetry import ProgressBoard

REQUESTS, PROMPT_TOKENS, BLOCKS, SLOTS = 16, 128, 512, 64
CONFIG = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 1024, "hidden_size": 32,
    "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 8, "num_experts": 32,
    "num_experts_per_tok": 8, "moe_intermediate_size": 16, "intermediate_size": 16, "norm_topk_prob": True,
    "tie_word_embeddings": True, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "hidden_act": "silu", "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False,
    "dtype": "float32", "use_sliding_window": False,
}  # fmt: skip


def make_worker(folder: Path) -> Worker:
    """Return one rank with dummy weights of the tiny widths."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    model = load_config(folder)
    assert model.moe is not None
    experts = model.moe.routing.num_experts
    worker = Worker(
        EngineConfig(
            model=ModelOptions(model="tiny", path=str(folder), load_format="dummy", max_model_len=1024),
            cache=CacheOptions(num_blocks=BLOCKS),
            schedule=ScheduleOptions(max_num_seqs=SLOTS),
        ),
        rank=0,
        num_ranks=1,
        exchange=LocalExchange(experts),
        placement=linear_placement(len(model.moe_layers), experts, 1),
        progress=ProgressBoard(1).rank(0),
        on_loading=lambda done, total: None,
    )
    worker.load()
    worker.allocate(BLOCKS)
    worker.warm_up()
    return worker


class CallTimer(TorchFunctionMode):
    """Adds up the time inside the calls of torch that Python makes."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds, self.num_calls = 0.0, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one call."""
        kwargs = kwargs or {}
        start = time.perf_counter()
        result = func(*args, **kwargs)
        self.seconds += time.perf_counter() - start
        self.num_calls += 1
        return result


def empty_call_seconds() -> float:
    """Return what `CallTimer` charges a call of a Python function that does nothing."""
    timer = CallTimer()
    for _ in range(10_000):
        timer.__torch_function__(lambda *args, **kwargs: None, (), (0, 1), {"dim": 0})
    return timer.seconds / timer.num_calls


def inside_torch(worker: Worker, plan: StepPlan, empty: float) -> tuple[float, int, StepResult]:
    """Run one step; return the milliseconds inside torch, the number of calls, and the result."""
    with CallTimer() as timer:
        result = worker.run(plan.header, plan.ranks[0])
    spent = timer.seconds - timer.num_calls * empty
    return spent * 1e3, timer.num_calls, StepResult(step=plan.header.step, ranks=(result,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    limits = SchedulerConfig(
        num_ranks=1, groups=(GroupLimits(num_blocks=BLOCKS),), block_size=16, max_model_len=1024, max_num_seqs=SLOTS,
        max_num_batched_tokens=512,
    )  # fmt: skip
    scheduler = Scheduler(limits)
    prompts = np.random.default_rng(0).integers(1, 1024, (REQUESTS, PROMPT_TOKENS), dtype=np.int32)
    params = SamplingParams(max_tokens=args.steps + 100, temperature=0, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        scheduler.add(Request(f"r{i}", prompt, params, seed=i, priority=0, arrival=float(i)))
    wall: list[float] = []
    inside: list[float] = []
    planning: list[float] = []
    num_calls: list[int] = []
    empty = empty_call_seconds()
    with tempfile.TemporaryDirectory() as folder:
        worker = make_worker(Path(folder))
        for step in range(args.steps + 20):
            start = time.perf_counter()
            plan = scheduler.schedule()
            assert plan is not None
            planned = time.perf_counter()
            steady = plan.header.kind == "decode" and plan.ranks[0].num_decodes == REQUESTS
            if steady and step % 2:
                spent, calls, result = inside_torch(worker, plan, empty)
                inside.append(spent)
                num_calls.append(calls)
                scheduler.apply(result)
                continue
            rank_result = worker.run(plan.header, plan.ranks[0])
            ran = time.perf_counter()
            assert len(rank_result.tokens) == 4 * REQUESTS or not steady
            scheduler.apply(StepResult(step=plan.header.step, ranks=(rank_result,)))
            if steady:
                wall.append((ran - planned) * 1e3)
                planning.append((planned - start + time.perf_counter() - ran) * 1e3)
    results: dict[str, Any] = {
        "step_ms": records.summary(wall),
        "inside_torch_ms": records.summary(inside),
        "planning_ms": records.summary(planning),
        "torch_calls": num_calls[-1],
    }
    pairs = min(len(wall), len(inside))
    results["outside_torch_ms"] = records.summary([wall[i] - inside[i] for i in range(pairs)])
    outside = results["outside_torch_ms"]["median"]
    step, inside_ms, beside = (results[key]["median"] for key in ("step_ms", "inside_torch_ms", "planning_ms"))
    print(
        f"a step of {REQUESTS} requests: {step:.2f} ms, of it in {num_calls[-1]} calls of torch {inside_ms:.2f} ms, "
        f"outside {outside:.2f} ms; planning and booking beside it {beside:.2f} ms (1 thread)"
    )
    records.write("step_overhead", results, args.out)


if __name__ == "__main__":
    main()
