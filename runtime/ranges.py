"""Which values the options of an engine may have, all in one table, checked before a model is looked for.

Not kinds (runtime/options.py) and not what depends on the model or the machine (runtime/resolve.py).
Units: as in runtime/config.py.
"""

from __future__ import annotations

import math
from typing import Any

from ..native.gpu import interpreting
from ..topologies import parse_topology
from ..topologies.exchange_choice import EXCHANGES, PAYLOADS
from ..topologies.overlap_choice import OVERLAPS
from .config import LOAD_FORMATS, QUANTIZATIONS, EngineConfig
from .scheduling.limits import POLICIES

MOST = 2**31 - 1
MOST_BYTES = 2**63 - 1
KERNELS = ("auto", "torch", "triton")
# The spellings that `quant.parse_format` takes for what a model can run in; quant itself would import torch here.
DTYPES = ("bfloat16", "bf16", "float16", "fp16", "half", "float32", "fp32", "float")


def check_ranges(config: EngineConfig) -> None:
    """Refuse a value that no model and no machine could make work.

    Raises:
        ValueError: one line with the field, the value and what is allowed.
    """
    for field, value, fine, fix in (*_words(config), *_numbers(config)):
        if not fine:
            raise ValueError(f"{field}={value!r} is not allowed; {fix}")


def eplb_file(eplb: str) -> str:
    """Return the file of `static FILE`, empty for everything else."""
    mode, _, file = eplb.strip().partition(" ")
    return file.strip() if mode == "static" else ""


def moves_experts(config: EngineConfig) -> bool:
    """Tell whether experts move while a resolved `config` serves."""
    return config.parallel.eplb.strip() == "auto" and parse_topology(config.parallel.topology).ep > 1


def _words(config: EngineConfig) -> list[tuple[str, Any, bool, str]]:
    model, parallel, policy, graphs = config.model, config.parallel, config.schedule.policy, config.graphs
    return [
        ("load_format", model.load_format, model.load_format in LOAD_FORMATS, f"use {', '.join(LOAD_FORMATS)}"),
        ("dtype", model.dtype, model.dtype.strip().lower().removeprefix("torch.") in ("auto", *DTYPES),
         "use auto (the checkpoint's), bfloat16, float16 or float32"),
        ("quantization", model.quantization, model.quantization in (None, *QUANTIZATIONS),
         f"use {' or '.join(QUANTIZATIONS)}, or leave it out; a checkpoint that is quantised already says so itself"),
        ("quantization", model.quantization, model.quantization is None or parallel.device == "cpu",
         "it quantises for a CPU only; leave it out with device cuda"),
        ("quantization", model.quantization, model.quantization is None or parallel.kernels == "auto",
         f"it quantises for native kernels; leave it out with kernels {parallel.kernels}"),
        ("ranks", parallel.ranks, parallel.ranks in ("processes", "threads"), "use processes or threads"),
        ("device", parallel.device, parallel.device in ("cpu", "cuda"), "use cpu or cuda"),
        ("kernels", parallel.kernels, parallel.kernels in KERNELS, f"use {', '.join(KERNELS)}"),
        ("kernels", parallel.kernels, parallel.kernels != "triton" or parallel.device == "cuda" or interpreting(),
         "a CPU has no Triton kernels; use auto, or device cuda"),
        ("batch_invariant", parallel.batch_invariant, not parallel.batch_invariant or parallel.kernels != "torch",
         "torch's products depend on the number of rows; leave kernels out"),
        ("batch_invariant", parallel.batch_invariant,
         not parallel.batch_invariant or parallel.device == "cuda" or parallel.kernels == "triton",
         "it is for device cuda; leave it out: in native kernels of a CPU (bf16) a row's bits never depend on others"),
        ("domains", parallel.domains, parallel.domains is None or parallel.device == "cpu",
         "a host emulates them; leave it out with device cuda"),
        ("exchange", parallel.exchange, parallel.exchange in EXCHANGES, f"use {', '.join(EXCHANGES)}"),
        ("exchange_payload", parallel.exchange_payload, parallel.exchange_payload in PAYLOADS,
         f"use {' or '.join(PAYLOADS)}"),
        ("overlap", parallel.overlap, parallel.overlap in OVERLAPS, f"use {', '.join(OVERLAPS)}"),
        ("eplb", parallel.eplb, parallel.eplb.strip() in ("off", "auto") or bool(eplb_file(parallel.eplb)),
         "use off, auto, or static FILE with the load of each expert, which moewe record --load FILE writes"),
        ("cuda_graph_sizes", list(graphs.cuda_graph_sizes), not graphs.cuda_graph_sizes or parallel.device == "cuda",
         "a CPU has no CUDA graphs; leave it out, or use --device cuda"),
        ("cuda_graph_sizes", list(graphs.cuda_graph_sizes), not (graphs.cuda_graph_sizes and graphs.enforce_eager),
         "enforce_eager captures none; leave one of the two out"),
        ("cuda_graph_max_bs", graphs.cuda_graph_max_bs, graphs.cuda_graph_max_bs is None or parallel.device == "cuda",
         "a CPU has no CUDA graphs; leave it out, or use --device cuda"),
        ("policy", policy, policy in POLICIES, f"use {' or '.join(POLICIES)}"),
        ("tokenizer", model.tokenizer, not (model.tokenizer and model.skip_tokenizer_init),
         "skip_tokenizer_init loads none; leave one of the two out"),
        ("chat_template", model.chat_template, not (model.chat_template and model.skip_tokenizer_init),
         "it needs the tokenizer that skip_tokenizer_init leaves out; leave one of the two out"),
        ("chat_template", model.chat_template, model.chat_template != "", "give a file, Jinja source, or a name"),
        ("generation_config", model.generation_config, bool(model.generation_config),
         "use auto, none, or a folder with a generation_config.json"),
    ]  # fmt: skip


def _numbers(config: EngineConfig) -> list[tuple[str, Any, bool, str]]:
    model, cache, parallel, schedule = config.model, config.cache, config.parallel, config.schedule
    sizes, most_rows = config.graphs.cuda_graph_sizes, config.graphs.cuda_graph_max_bs
    share, stall = cache.gpu_memory_utilization, schedule.stall_timeout_s
    kv, seqs, rows = cache.kv_cache_memory_bytes, schedule.max_num_seqs, schedule.max_num_batched_tokens
    return [
        ("seed", model.seed, 0 <= model.seed < 2**63, "use a whole number from 0 to 2^63 - 1"),
        ("max_model_len", model.max_model_len, model.max_model_len is None or 2 <= model.max_model_len <= MOST,
         "use at least 2 (prompt and output)"),
        ("threads", parallel.threads, parallel.threads is None or 1 <= parallel.threads <= 4096, "use 1 to 4096"),
        ("gpu_memory_utilization", share, 0 < share <= 1, "use a share above 0 and up to 1"),
        ("kv_cache_memory_bytes", kv, kv is None or 0 < kv <= MOST_BYTES, "use a positive number of bytes"),
        ("num_blocks", cache.num_blocks, cache.num_blocks is None or 0 < cache.num_blocks <= MOST, "use at least 1"),
        ("block_size", cache.block_size, 1 <= cache.block_size <= 256, "use 1 to 256 tokens, 16 by default"),
        ("max_num_seqs", seqs, 1 <= seqs <= MOST, "use at least 1, 64 by default"),
        ("max_num_batched_tokens", rows, 1 <= rows <= MOST, "use at least 1, 512 by default"),
        ("max_num_batched_tokens", rows, rows >= seqs,
         f"use at least max_num_seqs ({seqs}): each sequence runs at least one token a step"),
        ("max_queued_requests", schedule.max_queued_requests, 1 <= schedule.max_queued_requests <= MOST,
         "use at least 1, 4096 by default"),
        ("stall_timeout_s", stall, math.isfinite(stall) and stall >= 1, "use at least 1 second"),
        ("cuda_graph_sizes", list(sizes), all(1 <= size <= MOST for size in sizes),
         "use numbers of rows from 1 on, such as 1,2,4,8"),
        ("cuda_graph_max_bs", most_rows, most_rows is None or 1 <= most_rows <= MOST, "use at least 1 row"),
    ]  # fmt: skip
