"""Decode steps of the real engine on this host, timed for layouts and batches: what benchmarks/planner_cpu.py predicts.

Not a benchmark of its own. Models have random weights and the shapes of three kinds of MoE; ranks are processes as in
serving. Units: seconds; rows are sequences over all replicas, each of which adds a token in a step.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from moewe.runtime.config import CacheOptions, EngineConfig, ModelOptions, ParallelOptions, ScheduleOptions
from moewe.runtime.messages import Ready
from moewe.runtime.params import SamplingParams
from moewe.runtime.prompts import packed
from moewe.runtime.replicas import ReplicaSet
from moewe.topologies import parse_topology

VOCAB = 8192
PROMPT_TOKENS = 32
_LEAST_STEPS, _MOST_STEPS, _SECONDS = 8, 64, 1.0  # of which medians are taken

_COMMON = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": VOCAB, "head_dim": 64,
    "norm_topk_prob": True, "tie_word_embeddings": True, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "hidden_act": "silu", "decoder_sparse_step": 1, "mlp_only_layers": [],
    "attention_bias": False, "dtype": "bfloat16", "use_sliding_window": False,
}  # fmt: skip
# Few large experts as in Mixtral, many small ones as in DeepSeek-V3 and Qwen3, and the shape of granite-3.1-1b between.
MODELS: dict[str, dict[str, int]] = {
    "coarse": {
        "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1792, "intermediate_size": 1792,
    },
    "fine": {
        "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4,
        "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 256, "intermediate_size": 256,
    },
    "granite": {
        "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8,
        "num_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "intermediate_size": 512,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """One layout: what its ranks said when they were ready, and the median step by rows."""

    ready: list[Ready]
    seconds: dict[int, float]

    def record(self) -> dict[str, Any]:
        """Return it for a JSON file."""
        return {"ready": msgspec.to_builtins(self.ready), "seconds": self.seconds}


def write_model(folder: Path, name: str) -> Path:
    """Write the config of a model; `load_format="dummy"` makes its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_COMMON | MODELS[name]))
    return folder


def measure(folder: Path, topology: str, batches: list[int], *, threads: int) -> Measured:
    """Serve the model in `folder` on `topology`, each rank with `threads` threads, and time its decode steps."""
    replicas = ReplicaSet.start(
        EngineConfig(
            model=ModelOptions(model=folder.name, path=str(folder), dtype="bfloat16", load_format="dummy",
                               skip_tokenizer_init=True, max_model_len=1024),
            parallel=ParallelOptions(topology=topology, ranks="processes", threads=threads),
            cache=CacheOptions(num_blocks=1024),
            schedule=ScheduleOptions(max_num_seqs=max(batches)),
        )
    )  # fmt: skip
    try:
        replicas.wait_ready(300)
        _time(replicas, 1, parse_topology(topology).dp, 4)  # first steps touch memory
        return Measured(
            replicas.ready, {rows: _median_step(replicas, rows, parse_topology(topology).dp) for rows in batches}
        )
    finally:
        replicas.close()


def _median_step(replicas: ReplicaSet, rows: int, num_replicas: int) -> float:
    few = _time(replicas, rows, num_replicas, _LEAST_STEPS)
    number = int(min(_MOST_STEPS, max(_LEAST_STEPS, _SECONDS / few)))
    return _time(replicas, rows, num_replicas, number)


def _time(replicas: ReplicaSet, rows: int, num_replicas: int, steps: int) -> float:
    """Return the median gap between steps in which all `rows` sequences decode, the mean over sequences."""
    dice = np.random.default_rng(rows)
    new_tokens = steps + 4
    params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
    for number in range(rows):
        prompt = dice.integers(1, VOCAB, PROMPT_TOKENS).tolist()
        replicas.submit(str(number), packed(prompt), params)
    times: dict[str, list[float]] = {str(number): [] for number in range(rows)}
    ended = 0
    while ended < rows:
        for delta in replicas.poll(None):
            if delta.error:
                raise SystemExit(f"a request failed: {delta.error}")
            times[delta.request_id] += [time.perf_counter()] * len(delta.token_ids)
            ended += delta.finish_reason is not None
    last_first = max(each[0] for each in times.values())
    first_last = min(each[-1] for each in times.values())
    gaps = [
        float(np.median(inside[1:] - inside[:-1]))
        for each in times.values()
        if len(inside := np.array([at for at in each if last_first <= at <= first_last])) > 2
    ]
    return statistics.mean(gaps)
