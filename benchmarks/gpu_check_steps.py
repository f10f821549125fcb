"""Stage 3 of gpu_check: whole steps of a random checkpoint in the shape of Qwen3-30B-A3B, through the engine.

Decode by batch and prefill, with CUDA graphs and without, beside the least that bytes and products take; what the
memory really moved, where the GPU counts it (NVML GPM); and what batch invariance costs. Units: seconds, bytes.
"""

from __future__ import annotations

import importlib.resources
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.gpu_check_linear import fixed_launches
from benchmarks.gpu_check_plan import Item, LeftOut, share_figures
from moewe import LLM, SamplingParams
from moewe.attention.kernels.roofline import AttentionRows
from moewe.models.config import ModelConfig
from moewe.models.families import parse_content
from moewe.models.footprint import cache_groups, model_footprint
from moewe.models.kernels.launches import layer_launches
from moewe.models.published import published_config
from moewe.moe.kernels.launches import moe_launches
from moewe.moe.kernels.roofline import hit_experts
from moewe.native.gpu import GpuTarget, Launch
from moewe.native.gpu_counters import open_counters
from moewe.runtime.config import EngineConfig
from moewe.runtime.gpu_launches import moe_shapes
from moewe.runtime.metrics.stats import decode_counters
from moewe.runtime.ranks.kernels.launches import sampling_launches
from moewe.runtime.ranks.warm_up import warm_up_sizes
from moewe.telemetry import COMPONENTS
from moewe.topologies.kernel_work import Work

MODEL = "qwen3-30b-a3b"
CONTEXT = 1024
BATCHES = (1, 8, 32, 64)
PROMPT = 4096
_SHORT, _LONG = 32, 160  # tokens of the two runs whose difference is decode alone
_SLOW = {"torch's kernels": (4, 20)}  # the same of modes in which a step may take a second
_ASKED, _ANSWER = 4, 32  # prompts and tokens of answers that are compared
_FIRST_S = 150.0  # at most for an item, with the start of an engine
_KV_BYTES = 16 << 30
# What a mode sets; a mode whose field the engine does not have is left out.
MODES: dict[str, dict[str, Any]] = {
    "graphs": {"enforce_eager": False},
    "eager": {"enforce_eager": True},
    "batch-invariant": {"enforce_eager": False, "batch_invariant": True},
    "torch's kernels": {"kernels": "torch"},
}


def raw_config(layers: int | None = None) -> dict[str, Any]:
    """Return the config.json of the model, with so many layers."""
    text = (importlib.resources.files("moewe.models.published") / f"{MODEL}.json").read_text()
    config: dict[str, Any] = json.loads(text)["config"]
    return config if layers is None else {**config, "num_hidden_layers": layers}


def parsed(raw: Mapping[str, Any]) -> ModelConfig:
    """Return what moewe makes of it."""
    return parse_content(dict(raw), "config.json")


def decode_work(config: ModelConfig, batch: int, context: int) -> Work:
    """Return the least that a decode step does in bf16: weights of the experts that are hit, all others, and KV."""
    footprint = model_footprint(config, name=MODEL, dtype="bfloat16")
    hit = hit_experts(batch, footprint.num_experts, footprint.top_k)
    weights = footprint.attention_bytes + footprint.dense_bytes + footprint.shared_bytes + footprint.head_bytes
    weights += footprint.num_moe_layers * hit * footprint.expert_bytes
    attention = _attention_work(config, [(context - 1, 1)] * batch)
    return Work(bytes=weights + attention.bytes, flops=batch * footprint.flops_per_token + attention.flops)


def prefill_work(config: ModelConfig, tokens: int) -> Work:
    """Return the least that a prompt takes: all products but the head's, of which one row is needed, and attention."""
    footprint = model_footprint(config, name=MODEL, dtype="bfloat16")
    head = 2.0 * config.vocab_size * config.hidden_size
    attention = _attention_work(config, [(0, tokens)])
    decoded = decode_work(config, tokens, 1)
    flops = tokens * (footprint.flops_per_token - head) + head + attention.flops
    return Work(bytes=decoded.bytes, flops=flops)


def _attention_work(config: ModelConfig, runs: list[tuple[int, int]]) -> Work:
    total = Work(bytes=0.0)
    for group in cache_groups(config, dtype="bfloat16"):
        one = AttentionRows(group=group, num_heads=config.num_heads).work(runs)
        layers = len(group.layers)
        total = Work(bytes=total.bytes + layers * one.bytes, flops=total.flops + layers * one.flops)
    return total


def unknown_options(options: Mapping[str, Any]) -> list[str]:
    """Return those that this version of the engine does not have."""
    parts = [part.type for part in msgspec.structs.fields(EngineConfig)]
    known = {field.name for part in parts for field in msgspec.structs.fields(part)}
    return sorted(set(options) - known)


def captures(config: EngineConfig) -> bool:
    """Return whether an engine means to capture decode steps; where a capture fails after all, it warns on stderr."""
    return config.parallel.device == "cuda" and bool(config.graphs.graph_rows)


@dataclass
class Engines:
    """The engine of the last mode: a start takes longer than what is measured on it.

    Attributes:
        folder: where config.json is written.
        raw: the config.
        options: of every engine.
        start_seconds: of the last start in each mode.
        answers: in each mode, tokens of each prompt of `answered`.
        failed: modes whose engine did not start, with why; it is not tried again.
    """

    folder: Path
    raw: Mapping[str, Any]
    options: Mapping[str, Any]
    _mode: str | None = None
    _llm: LLM | None = None
    start_seconds: dict[str, float] = field(default_factory=dict)
    answers: dict[str, list[list[int]]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def kind(self, mode: str) -> str:
        """Return of which kind an item is that asks for `mode` now: with a start, or without."""
        return "step" if self._llm is not None and self._mode == mode else "start"

    def of(self, mode: str) -> LLM:
        """Return an engine in `mode`; the one before ends."""
        missing = unknown_options(MODES[mode])
        if missing:
            raise LeftOut(f"this version has no {', '.join(missing)}")
        if mode in self.failed:
            raise LeftOut(f"the engine did not start: {self.failed[mode]}")
        if self._llm is None or self._mode != mode:
            self.close()
            (self.folder / "config.json").write_text(json.dumps(dict(self.raw)))
            began = time.monotonic()
            try:
                self._llm = LLM(
                    str(self.folder), load_format="dummy", skip_tokenizer_init=True, **self.options, **MODES[mode]
                )
            except Exception as error:
                self.failed[mode] = f"{type(error).__name__}: {error}"[:200]
                raise
            self._mode, self.start_seconds[mode] = mode, time.monotonic() - began
        if MODES[mode].get("enforce_eager") is False and not captures(self._llm.config):
            raise LeftOut("this engine captures no CUDA graphs; its log says why")  # or eager steps would be called so
        return self._llm

    def close(self) -> None:
        """End it."""
        if self._llm is not None:
            self._llm.close()
            self._llm = None


def prompts(number: int, length: int, vocab: int, seed: int) -> list[dict[str, list[int]]]:
    """Return random prompts, others for every call with other arguments: none is found in the prefix cache."""
    ids = np.random.default_rng([number, length, seed]).integers(1, vocab, (number, length))
    return [{"prompt_token_ids": row} for row in ids.tolist()]


def timed(llm: LLM, batch: list[dict[str, list[int]]], new_tokens: int) -> float:
    """Return the time of one call."""
    params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
    began = time.monotonic()
    llm.generate(batch, params)
    return time.monotonic() - began


def decode_seconds(llm: LLM, batch: int, context: int, vocab: int, tokens: tuple[int, int]) -> float:
    """Return the time of a step: of two runs, whose prompts take the same, the longer less the shorter."""
    short, long = tokens
    times = []
    for seed in range(2):
        asked = (prompts(batch, context - long, vocab, 2 * seed + i) for i in range(2))
        times.append(-timed(llm, next(asked), short) + timed(llm, next(asked), long))
    return min(times) / (long - short)


def decode_figures(
    llm: LLM, config: ModelConfig, batch: int, ceilings: Mapping[str, float], tokens: tuple[int, int]
) -> dict[str, Any]:
    """Return the figures of decode steps behind CONTEXT tokens."""
    seconds = decode_seconds(llm, batch, CONTEXT, config.vocab_size, tokens)
    work = decode_work(config, batch, CONTEXT - (tokens[1] - tokens[0]) // 2)
    return {**share_figures(work.bytes, work.flops, seconds, ceilings), "tokens_per_second": batch / seconds}


def prefill_figures(llm: LLM, config: ModelConfig, tokens: int, ceilings: Mapping[str, float]) -> dict[str, Any]:
    """Return the figures of a prompt, from the call to its first token."""
    seconds = min(timed(llm, prompts(1, tokens, config.vocab_size, 90 + seed), 1) for seed in range(3))
    work = prefill_work(config, tokens)
    return {**share_figures(work.bytes, work.flops, seconds, ceilings), "tokens_per_second": tokens / seconds}


def counted_bytes(llm: LLM) -> float:
    """Return what the engine says that its memory moved since its start; waits until it has told of its last step."""
    session = llm._session
    session.num_preemptions()
    counters = [decode_counters(rank) for stats in session._replicas.stats() for rank in stats.ranks]
    memory = [i for i, component in enumerate(COMPONENTS) if component != "exchange"]
    return float(sum(one.bytes_moved[:, memory].sum() for one in counters))


def saturation_figures(
    llm: LLM, config: ModelConfig, batch: int, ceilings: Mapping[str, float], uuid: str
) -> dict[str, Any]:
    """Return what the memory moved by the GPU's own count and by the engine's, while a batch was decoded."""
    counter = open_counters(uuid).memory
    if counter is None:
        return {"said": "no GPM counter: an older GPU, no nvidia-ml-py, or the driver refuses"}
    timed(llm, prompts(batch, 16, config.vocab_size, 7), 8)
    before = counted_bytes(llm)
    counter.take()
    seconds = timed(llm, prompts(batch, 16, config.vocab_size, 8), CONTEXT)
    moved = counter.take()
    counted = counted_bytes(llm) - before
    if not moved:
        return {"said": "GPM: the counter stopped"}
    share = moved / seconds / ceilings["copy_bytes_per_second"]
    return {
        "measured_bytes_per_second": moved / seconds,
        "bandwidth_share": share,
        "counted_over_measured": counted / moved,
        "said": f"GPM: {moved / seconds / 1e12:.2f} TB/s; the engine counted {counted / moved:.0%} of what was moved",
    }


def answered(llm: LLM, vocab: int, *, together: bool) -> list[list[int]]:
    """Return the most likely tokens behind some prompts, computed together or one after the other."""
    asked = prompts(_ASKED, 40, vocab, 55)
    params = SamplingParams(max_tokens=_ANSWER, temperature=0, ignore_eos=True)
    found = llm.generate(asked, params) if together else [llm.generate(one, params)[0] for one in asked]
    return [one.outputs[0].token_ids for one in found]


def same_answers(actual: list[list[int]], expected: list[list[int]], what: str) -> dict[str, Any]:
    """Return that they are the same; raises AssertionError where they are not."""
    for prompt, (one, other) in enumerate(zip(actual, expected, strict=True)):
        if one != other:
            at = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
            raise AssertionError(f"prompt {prompt}: token {at} is another than {what}")
    return {"said": f"the same tokens as {what}"}


def _answers(engines: Engines, mode: str, vocab: int) -> dict[str, Any]:
    """A replay has the bits of an eager step of as many rows, so one prompt runs at a time; fixed tiles do not care."""
    llm = engines.of(mode)
    alone = engines.answers[mode] = answered(llm, vocab, together=False)
    if mode == "batch-invariant":
        return same_answers(answered(llm, vocab, together=True), alone, "alone")
    if mode == "eager":
        if "graphs" not in engines.answers:
            raise LeftOut("those with graphs are of another run; remove their line from steps.json")
        return same_answers(alone, engines.answers["graphs"], "with graphs")
    return {"said": "kept"}


def items(engines: Engines, ceilings: Mapping[str, float], uuid: str) -> Iterator[Item]:
    """Yield the items of the stage, a mode's together."""
    config = parsed(engines.raw)

    def decode(mode: str, batch: int) -> dict[str, Any]:
        figures = decode_figures(engines.of(mode), config, batch, ceilings, _SLOW.get(mode, (_SHORT, _LONG)))
        return {**figures, "goal": "decode step" if mode == "graphs" and batch == 1 else None}

    def prefill(mode: str) -> dict[str, Any]:
        return prefill_figures(engines.of(mode), config, PROMPT, ceilings)

    def saturation(mode: str) -> dict[str, Any]:
        return saturation_figures(engines.of(mode), config, 32, ceilings, uuid)

    for rank, mode in enumerate(MODES):
        made: list[tuple[str, Callable[[], dict[str, Any]]]] = [
            (f"decode, {mode}, batch {batch}", partial(decode, mode, batch)) for batch in BATCHES
        ]
        made.append((f"prefill, {mode}, {PROMPT} tokens", partial(prefill, mode)))
        if mode in ("graphs", "eager", "batch-invariant"):
            made.append((f"tokens, {mode}", partial(_answers, engines, mode, config.vocab_size)))
        if not rank:
            made.append((f"saturation, {mode}, batch 32", partial(saturation, mode)))
        for name, run in made:
            yield Item(
                name=name, rank=rank, run=run, floor_s=3, most_s=_FIRST_S, kind=partial(engines.kind, mode),
                group=mode,
            )  # fmt: skip


def step_launches(target: GpuTarget) -> Iterator[Launch]:
    """Yield what an engine of this stage launches, over tensors without memory: in graphs, warm-up and prompts."""
    config = published_config(MODEL)
    shapes = moe_shapes(config, ("bf16",))
    sizes = {*warm_up_sizes(16, PROMPT, compiles=True), *range(8, max(BATCHES) + 1, 8), 1, 2, 4}
    yield from layer_launches(config, target)
    yield from sampling_launches(config.vocab_size, config.hidden_size)
    yield from moe_launches(shapes, target, sorted(sizes))
    yield from fixed_launches(target)


def options_for_gpu() -> dict[str, Any]:
    """Return what engines are started with."""
    return {
        "device": "cuda", "dtype": "bfloat16", "max_model_len": PROMPT + _LONG, "max_num_seqs": max(BATCHES),
        "max_num_batched_tokens": PROMPT, "kv_cache_memory_bytes": _KV_BYTES,
    }  # fmt: skip
