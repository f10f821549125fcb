"""One runtime that loads a checkpoint and generates on request, run by the Python that has the runtime's library.

Not a benchmark: peers.py starts one for each runtime and format and speaks JSON lines with it. First line in:
`{"runtime", "path", "weights", "threads"}`, answer `{"seconds", "version"}`. Then `{"prompts": [[id]], "new_tokens"}`,
answer `{"tokens": [[id]], "seconds"}`: greedy, no end token, wall time of the call without the transport. The end of
stdin ends it; an exception ends it too, with the traceback on stderr. Nothing of moewe is imported but by its own
adapter, and no adapter lets its runtime reuse prefixes, as the same prompts come again.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[list[int]], int], list[list[int]]]

# What peers.py may ask for at once: adapters reserve their caches for it.
MAX_REQUESTS = 32
MAX_TOKENS = 640
CACHE_GB = 1


def moewe(order: dict[str, Any]) -> Generate:
    from moewe import LLM, SamplingParams

    weights: dict[str, Any] = {} if order["weights"] == "bf16" else {"quantization": order["weights"]}
    llm = LLM(
        order["path"], threads=order["threads"], skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=64,
        kv_cache_memory_bytes=CACHE_GB << 30, **weights,
    )  # fmt: skip

    def generate(batch: list[list[int]], new_tokens: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in batch], params)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


def vllm(order: dict[str, Any]) -> Generate:
    cores = sorted(os.sched_getaffinity(0))[: order["threads"]]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(CACHE_GB)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # no socket between us and the engine: to its advantage
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    from vllm import LLM, SamplingParams

    llm = LLM(
        order["path"], skip_tokenizer_init=True, dtype="bfloat16", max_model_len=1024, max_num_seqs=64,
        enable_prefix_caching=False,
    )  # fmt: skip

    def generate(batch: list[list[int]], new_tokens: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in batch], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


def transformers(order: dict[str, Any]) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(order["threads"])
    model = AutoModelForCausalLM.from_pretrained(
        order["path"], dtype=torch.bfloat16, attn_implementation="sdpa", experts_implementation="grouped_mm"
    ).eval()

    def generate(batch: list[list[int]], new_tokens: int) -> list[list[int]]:
        ids = torch.tensor(batch)
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, min_new_tokens=new_tokens,
                do_sample=False, pad_token_id=0,
            )  # fmt: skip
        return out[:, ids.shape[1] :].tolist()

    return generate


def openvino(order: dict[str, Any]) -> Generate:
    import numpy as np
    import openvino
    import openvino_genai

    limits = openvino_genai.SchedulerConfig()
    limits.cache_size = CACHE_GB
    limits.enable_prefix_caching = False
    limits.max_num_seqs = 64
    limits.max_num_batched_tokens = 2048  # its own 256 would cut a prompt of 512 tokens in two
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        order["path"], limits, "CPU", {"INFERENCE_NUM_THREADS": order["threads"]}
    )

    def generate(batch: list[list[int]], new_tokens: int) -> list[list[int]]:
        params = openvino_genai.GenerationConfig()
        params.max_new_tokens, params.ignore_eos, params.do_sample = new_tokens, True, False
        params.set_eos_token_id(0)  # ignored, but it refuses the -1 of a checkpoint that names none
        prompts = [openvino.Tensor(np.array([ids], np.int64)) for ids in batch]
        outputs = pipeline.generate(prompts, [params] * len(batch))
        return [list(output.m_generation_ids[0]) for output in outputs]

    return generate


class LlamaCpp:
    """llama.cpp through its C API: every sequence has a stream of the cache to itself, all decode in one batch."""

    BATCH_ROWS = 2048

    def __init__(self, order: dict[str, Any]) -> None:
        import llama_cpp

        self._lib = llama_cpp
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        model = llama_cpp.llama_model_load_from_file(order["path"].encode(), params)
        if not model:
            raise SystemExit(f"llama.cpp could not load {order['path']}")
        limits = llama_cpp.llama_context_default_params()
        limits.n_ctx, limits.n_seq_max, limits.kv_unified = MAX_REQUESTS * MAX_TOKENS, MAX_REQUESTS, False
        limits.n_batch, limits.n_ubatch = self.BATCH_ROWS, 512
        limits.n_threads = limits.n_threads_batch = order["threads"]
        self._context = llama_cpp.llama_init_from_model(model, limits)
        if not self._context:
            raise SystemExit("llama.cpp could not make a context")
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def __call__(self, batch: list[list[int]], new_tokens: int) -> list[list[int]]:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        rows = [(ids[at], at, number, at == len(ids) - 1) for number, ids in enumerate(batch) for at in range(len(ids))]
        last: dict[int, int] = {}
        for start in range(0, len(rows), self.BATCH_ROWS):
            last |= self._decode(rows[start : start + self.BATCH_ROWS])
        tokens = [[last[number]] for number in range(len(batch))]
        for step in range(new_tokens - 1):
            last = self._decode([(tokens[n][-1], len(ids) + step, n, True) for n, ids in enumerate(batch)])
            for number, token in last.items():
                tokens[number].append(token)
        return tokens

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Run rows of (token, position, sequence, wanted); return the likeliest next token of each wanted one."""
        import numpy as np

        batch = self._lib.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for row, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[row], batch.pos[row], batch.logits[row] = token, position, wanted
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
        code = self._lib.llama_decode(self._context, batch)
        if code:
            raise SystemExit(f"llama_decode returned {code}")
        found = {}
        for row, (_, _, sequence, wanted) in enumerate(rows):
            if wanted:
                logits = self._lib.llama_get_logits_ith(self._context, row)
                found[sequence] = int(np.argmax(np.ctypeslib.as_array(logits, (self._vocabulary,))))
        self._lib.llama_batch_free(batch)
        return found


# Runtime -> adapter and the distribution whose version is recorded.
RUNTIMES: dict[str, tuple[Callable[[dict[str, Any]], Generate], str]] = {
    "moewe": (moewe, "moewe"),
    "llamacpp": (LlamaCpp, "llama-cpp-python"),
    "vllm": (vllm, "vllm-cpu"),
    "openvino": (openvino, "openvino-genai"),
    "transformers": (transformers, "transformers"),
}


def main() -> None:
    # A stopped worker does not see the end of its stdin, so the kernel has to end it when peers.py is killed.
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        return
    # Libraries print to stdout: they get stderr, the answers get a descriptor that only we know.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    order = json.loads(sys.stdin.readline())
    adapter, distribution = RUNTIMES[order["runtime"]]
    start = time.perf_counter()
    generate = adapter(order)
    answer({"seconds": time.perf_counter() - start, "version": importlib.metadata.version(distribution)})
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        tokens = generate(request["prompts"], request["new_tokens"])
        answer({"seconds": time.perf_counter() - start, "tokens": tokens})


if __name__ == "__main__":
    main()
