"""From what a user left open to numbers: a new `EngineConfig` without `auto`, each choice logged once.

Not parsing and not loading; it reads config.json and the host's size, no weights. Runs once, before any engine starts.
Units: bytes, blocks, tokens, logical CPUs; per rank where not said otherwise.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from ..attention.native_formats import serves
from ..models.config import ModelConfig
from ..models.families import load_config, unread_fields
from ..models.footprint import model_footprint
from ..models.head_shares import check_heads
from ..models.headers import check_weights
from ..native.library import outcome
from ..quant import NumberFormat, parse_format, parse_kv_format, weight_scheme
from ..text import check_tokenizer_files
from ..topologies import (
    AUTO,
    ByteBudget,
    KVGroup,
    ModelFootprint,
    StepLimits,
    Topology,
    byte_budget,
    check_fits,
    check_runnable,
    kv_sizes,
    parse_topology,
)
from ..topologies.exchange_choice import check_exchange
from ..topologies.hardware import available_memory_bytes, host_cores, host_memory_bytes, numa_nodes
from ..topologies.overlap_choice import check_overlap
from .auto_topology import auto_topology
from .config import CacheOptions, EngineConfig
from .gpus import gpu_memory_bytes
from .graphs.choosing import with_graphs
from .kernels import exchange_rule
from .kv_layout import UNBOUNDED, scheduler_limits, step_limits
from .placements import with_load
from .prompts import tokenizer_folder
from .ranges import check_ranges
from .scheduling.limits import SchedulerConfig

log = logging.getLogger(__name__)

# On CPU, KV whose size nobody asked for takes at most this part of the host's memory (1/8): it is zeroed at start, and
# the host has other things to do. Ask for more with --kv-cache-memory-bytes.
CPU_KV_DIVISOR = 8
THREADS_VARIABLE = "OMP_NUM_THREADS"


@dataclass(frozen=True, kw_only=True)
class OtherMemory:
    """What ranks of ours that run already use of this host: `freed_bytes` end in time, `kept_bytes` stay meanwhile."""

    freed_bytes: int = 0
    kept_bytes: int = 0


NOBODY = OtherMemory()


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """Everything that is known before loading.

    Attributes:
        config: without `auto`; on CPU with the exact number of blocks.
        topology: parsed.
        model: the checkpoint's config.
        footprint: what the model weighs.
        budget: bytes of the fullest rank; on a GPU its KV is an estimate, the rank itself looks at what is left.
        fixed_max_model_len: the length was asked for and may not be lowered.
        cpus: per global rank, the logical CPUs to run on; empty binds nothing.
        asked: what all of this was made from.
    """

    config: EngineConfig
    topology: Topology
    model: ModelConfig
    footprint: ModelFootprint
    budget: ByteBudget
    fixed_max_model_len: bool
    cpus: tuple[tuple[int, ...], ...]
    asked: EngineConfig

    @property
    def most_requests(self) -> int:
        """Requests that a replica takes at once, running and waiting."""
        return _schedule_limits(self.config, self.footprint).most_requests


def check_checkpoint(resolved: Resolved) -> None:
    """Refuse a checkpoint with wrong tensors or without a tokenizer before any process starts; reads only headers.

    Raises:
        ValueError: what loading would say, one line.
    """
    model = resolved.config.model
    if model.load_format != "dummy":
        check_weights(Path(model.path), resolved.model)
    if not model.skip_tokenizer_init:
        check_tokenizer_files(tokenizer_folder(model))


def resolve(config: EngineConfig, *, others: OtherMemory = NOBODY) -> Resolved:
    """Fill in what `config` leaves open, or refuse what cannot run.

    Args:
        config: what was asked for.
        others: memory of this host that ranks which run already take.

    Raises:
        ValueError: one line with the field, the value and the fix (a ConfigError or TopologyError among them).
    """
    check_ranges(config)
    asked_config = config
    is_open = config.parallel.topology.strip().lower() == AUTO
    topology = None if is_open else parse_topology(config.parallel.topology)
    model = load_config(Path(config.model.path))
    if unread := unread_fields(Path(config.model.path)):
        log.info("config.json: fields that this version does not read: %s", ", ".join(map(ascii, unread[:20])))
    gpus = gpu_memory_bytes() if config.parallel.device == "cuda" else None
    if topology is not None:
        _check_runnable(config, topology, model, gpus)
    dtype = parse_format(config.model.dtype_for(model.dtype))
    if config.model.dtype == "auto":
        log.info("dtype: %s, the checkpoint's", dtype.name)
    if dtype.name == "float16" and model.dtype == "bfloat16":
        log.warning(
            "dtype float16: the checkpoint is bfloat16, whose values may be too large for it; a request that meets one "
            "ends with an error; bfloat16 holds them all"
        )
    kv_format = _kv_format(config, dtype)
    quantization = config.model.quantization
    if quantization is not None:
        _check_quantization(quantization, model, dtype)
    scheme = weight_scheme(quantization) if quantization is not None else None
    footprint = model_footprint(model, name=config.model.model, dtype=dtype, scheme=scheme, kv_dtype=kv_format)
    asked = config.model.max_model_len
    if asked is not None and asked > model.max_position_embeddings:
        raise ValueError(
            f"max_model_len={asked} is more than the model was made for; use at most {model.max_position_embeddings}"
        )
    config = msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(
            config.model, dtype=dtype.name, max_model_len=asked or model.max_position_embeddings
        ),
        cache=msgspec.structs.replace(config.cache, kv_cache_dtype=kv_format.name),
    )
    if topology is None:
        host_bytes = _usable_bytes(config.cache, others)
        topology = auto_topology(
            config, footprint, gpus=gpus, cores=host_cores(), host_bytes=host_bytes, fixed=asked is not None
        )
        _check_runnable(config, topology, model, gpus)
    config = with_load(config, model, topology)
    if gpus is not None:
        config = with_graphs(config, topology, exchange_rule(config, topology, has_native=False), model, footprint)
    threads, cpus = _compute(config, topology)
    config = msgspec.structs.replace(
        config, parallel=msgspec.structs.replace(config.parallel, topology=topology.long(), threads=threads)
    )
    if gpus is None:
        config, budget = _fit_host(config, topology, footprint, fixed=asked is not None, others=others)
    else:
        smallest = min(gpus[: topology.num_ranks])
        budget = _gpu_budget(config, topology, footprint, smallest, fixed=asked is not None)
    _schedule_limits(config, footprint)
    for line in topology.warnings():
        log.warning("%s", line)
    return Resolved(
        config=config,
        topology=topology,
        model=model,
        footprint=footprint,
        budget=budget,
        fixed_max_model_len=asked is not None,
        cpus=cpus,
        asked=asked_config,
    )


def rank_memory_bytes(cache: CacheOptions, topology: Topology, others: OtherMemory = NOBODY) -> int:
    """Return what a rank on CPU may use: its part of the share of this host that is allowed and free now, or then."""
    return _usable_bytes(cache, others) // topology.num_ranks


def _usable_bytes(cache: CacheOptions, others: OtherMemory) -> int:
    allowed = int(host_memory_bytes() * cache.gpu_memory_utilization) - others.kept_bytes
    return max(1, min(allowed, available_memory_bytes() + others.freed_bytes))


def _check_runnable(config: EngineConfig, topology: Topology, model: ModelConfig, gpus: tuple[int, ...] | None) -> None:
    check_runnable(
        topology,
        num_experts=model.moe.routing.num_experts if model.moe is not None else 0,
        num_ranks_available=None if gpus is None else len(gpus),
        unit="rank" if gpus is None else "GPU",
    )
    check_heads(model, topology)
    # Nothing is compiled to answer what was not asked: the port is not even bound yet.
    has_native = config.parallel.exchange != "shm" or outcome().library is not None
    rule = exchange_rule(config, topology, has_native=has_native)
    check_exchange(rule.grid, rule.facts)
    check_overlap(config.parallel.overlap, rule.grid, rule.facts)


def kv_blocks(cache: CacheOptions, groups: Sequence[KVGroup], limits: StepLimits, *, free_bytes: int) -> int:
    """Return how many KV blocks a rank shall hold, in a cache group that keeps whole sequences.

    Args:
        cache: exact numbers in it win.
        groups: of the model, as a rank holds them.
        limits: blocks that no step within them can use are not held.
        free_bytes: what is left for KV once weights and buffers are in place.
    """
    if cache.num_blocks is not None:
        return cache.num_blocks
    if cache.kv_cache_memory_bytes is not None:
        return kv_sizes.blocks_in(groups, limits, cache.kv_cache_memory_bytes)
    return min(kv_sizes.blocks_in(groups, limits, free_bytes), kv_sizes.most_useful(groups, limits))


def _fit_host(
    config: EngineConfig, topology: Topology, footprint: ModelFootprint, *, fixed: bool, others: OtherMemory
) -> tuple[EngineConfig, ByteBudget]:
    cache, limits = config.cache, step_limits(config)
    memory = rank_memory_bytes(cache, topology, others)

    def budget_at(limits: StepLimits, kv_bytes: int) -> ByteBudget:
        return byte_budget(footprint, topology, limits, rank_memory_bytes=memory, kv_bytes=kv_bytes)

    budget = budget_at(limits, 0)
    groups = budget.kv_groups
    modest = kv_sizes.modest_kv_bytes(groups, limits, host_memory_bytes() // CPU_KV_DIVISOR // topology.num_ranks)
    num_blocks = kv_blocks(cache, groups, limits, free_bytes=min(memory - budget.fixed_bytes, modest))
    longest = kv_sizes.longest_sequence(groups, limits, num_blocks)
    if 0 < longest < limits.max_model_len and not fixed:
        log.info("max_model_len: %d, lowered from the model's %d to what KV holds", longest, limits.max_model_len)
        limits = replace(limits, max_model_len=longest)
    num_bytes = kv_sizes.kv_bytes(groups, limits, num_blocks)
    budget = budget_at(limits, num_bytes)
    check_fits(budget, host_bytes=memory * topology.num_ranks)
    if cache.num_blocks is None:
        sizes = ", ".join(f"{group.name} {n}" for group, n in zip(groups, budget.group_blocks, strict=True))
        log.info(
            "KV: %s blocks of %d tokens a rank, %d bytes, %s", sizes, cache.block_size, num_bytes, cache.kv_cache_dtype
        )
    model = msgspec.structs.replace(config.model, max_model_len=limits.max_model_len)
    cache = msgspec.structs.replace(cache, num_blocks=num_blocks)
    return msgspec.structs.replace(config, model=model, cache=cache), budget


def _gpu_budget(
    config: EngineConfig, topology: Topology, footprint: ModelFootprint, memory_bytes: int, *, fixed: bool
) -> ByteBudget:
    """Return the budget of a GPU of `memory_bytes`, or refuse it; the rank will set KV by what it really has left."""
    cache, limits = config.cache, step_limits(config)
    usable = int(memory_bytes * cache.gpu_memory_utilization)

    def budget_at(limits: StepLimits, kv_bytes: int | None) -> ByteBudget:
        return byte_budget(footprint, topology, limits, rank_memory_bytes=usable, kv_bytes=kv_bytes)

    kv_bytes = cache.kv_cache_memory_bytes
    if cache.num_blocks is not None:
        kv_bytes = kv_sizes.kv_bytes(budget_at(limits, 0).kv_groups, limits, cache.num_blocks)
    budget = budget_at(limits, kv_bytes)
    if 0 < budget.longest_sequence < limits.max_model_len and not fixed:
        limits = replace(limits, max_model_len=budget.longest_sequence)
        budget = budget_at(limits, budget.kv_bytes)
    check_fits(budget)
    return budget


def _compute(config: EngineConfig, topology: Topology) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """Return compute threads a rank and, when binding, the CPUs of every global rank."""
    cpus = rank_cpus(numa_nodes(), topology.num_ranks) if config.parallel.numa_bind else ()
    threads = config.parallel.threads
    if threads is None and (threads := named_threads(os.environ)) is not None:
        log.info("threads: %d a rank, as %s says; %d cores for %d ranks", threads, THREADS_VARIABLE, host_cores(),
                 topology.num_ranks)  # fmt: skip
    elif threads is None:
        threads = min(len(own) for own in cpus) if cpus else max(1, host_cores() // topology.num_ranks)
        log.info("threads: %d a rank, %d cores for %d ranks", threads, host_cores(), topology.num_ranks)
    return threads, cpus


def named_threads(environment: Mapping[str, str]) -> int | None:
    """Return the threads that OMP_NUM_THREADS names; of a list the first, as OpenMP has it, None where it is none."""
    value = environment.get(THREADS_VARIABLE, "").partition(",")[0].strip()
    if value.isascii() and value.isdigit() and int(value) > 0:
        return int(value)
    if value:
        log.warning("%s=%s is no number of threads and is not used; set --threads", THREADS_VARIABLE, value[:40])
    return None


def rank_cpus(nodes: list[list[int]], num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Deal the CPUs of `nodes` to ranks: consecutive ranks share a node, and no rank spans two unless it must.

    Example:
        >>> rank_cpus([[0, 1], [2, 3]], 4)
        ((0,), (1,), (2,), (3,))
    """
    if num_ranks < len(nodes):
        starts = [len(nodes) * rank // num_ranks for rank in range(num_ranks + 1)]
        return tuple(tuple(cpu for node in nodes[a:b] for cpu in node) for a, b in itertools.pairwise(starts))
    dealt: list[tuple[int, ...]] = []
    for i, node in enumerate(nodes):
        count = num_ranks * (i + 1) // len(nodes) - num_ranks * i // len(nodes)
        for j in range(count):
            own = node[len(node) * j // count : len(node) * (j + 1) // count]
            dealt.append(tuple(own or [node[j % len(node)]]))
    return tuple(dealt)


def _kv_format(config: EngineConfig, dtype: NumberFormat) -> NumberFormat:
    """Return what KV is stored as beside a model that runs in `dtype`; say so where it is another format."""
    found = parse_kv_format(config.cache.kv_cache_dtype, dtype)
    if found.is_scaled and not serves(dtype, config.parallel.device):
        log.warning(
            "kv_cache_dtype %s: torch turns each block that is read into %s, which is slow; native kernels read it in "
            "place, on a CPU and with dtype bfloat16 (see `moewe doctor`)", found.name, dtype.name,
        )  # fmt: skip
    return found


def _check_quantization(asked: str, model: ModelConfig, dtype: NumberFormat) -> None:
    """Refuse to quantise what is quantised already, or where nothing multiplies the result."""
    if model.quantization is not None:
        raise ValueError(
            f"quantization={asked!r}: the checkpoint is quantised already ({model.quantization.scheme.kind}); leave "
            "quantization out, or use the bf16 weights"
        )
    if dtype.name != "bfloat16":
        raise ValueError(f"quantization={asked!r} computes in bfloat16, not in {dtype.name}; use --dtype bfloat16")
    if outcome().library is None:
        raise ValueError(
            f"quantization={asked!r} needs the native kernels, which are not used here: {outcome().why}; see "
            "`moewe doctor`, or leave quantization out"
        )


def _schedule_limits(config: EngineConfig, footprint: ModelFootprint) -> SchedulerConfig:
    """Return what the scheduler will plan within; it refuses its limits before anything is loaded."""
    # On a GPU the ranks will say how many blocks they hold.
    num_blocks = config.cache.num_blocks or UNBOUNDED
    return scheduler_limits(config, footprint.kv_groups, num_blocks=num_blocks)
