"""How a run of the harness is set up, and the engine's and the scheduler's configuration that follow from it.

Not resolving (runtime/resolve.py): every number is given, so that a test can force preemption or odd chunks.
Units: tokens, blocks; per rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from moewe.models.config import ModelConfig
from moewe.models.footprint import kv_groups, model_footprint
from moewe.quant import parse_format, parse_kv_format
from moewe.runtime.config import (
    CacheOptions,
    EngineConfig,
    GraphOptions,
    ModelOptions,
    ParallelOptions,
    ScheduleOptions,
)
from moewe.runtime.kernels import exchange_rule
from moewe.runtime.kv_layout import kv_layout, step_limits
from moewe.runtime.overlap import overlap_facts
from moewe.runtime.scheduler import SchedulerConfig
from moewe.topologies import parse_topology
from moewe.topologies.exchange_choice import ExchangeRule
from moewe.topologies.overlap_choice import moe_load


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Topology, memory and limits of a run.

    Attributes:
        num_blocks: of cache groups that keep whole sequences.
        window_blocks: most blocks of cache groups with a window or chunks; None leaves them what `kv_layout` gives.
        max_chunk_tokens: bounds one prompt's share of a step; None leaves it to `max_num_batched_tokens`.
        quantization: of weights, at load.
        kv_cache_dtype: how KV is stored.
        depth: steps in flight.
        keep_logits: record the logits of every row.
        eos_token_ids: end tokens; None takes the model's.
        device, exchange, exchange_payload, overlap, kernels, batch_invariant, graphs: as the options.
        eplb: as the option; with `auto` a `Group` can `move` experts.
        eplb_load: by which experts are placed, [MoE layers, experts] i64 as bytes; empty places them evenly.
        eplb_slots: where they stand, [MoE layers, slots] i32 as bytes, if that does not follow from the load alone.
    """

    topology: str = "EP1DP1"
    num_blocks: int = 256
    window_blocks: int | None = None
    block_size: int = 16
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    max_chunk_tokens: int | None = None
    max_model_len: int | None = None
    dtype: str = "float32"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    load_format: str = "auto"
    policy: str = "fcfs"
    depth: int = 2
    keep_logits: bool = True
    eos_token_ids: tuple[int, ...] | None = None
    device: str = "cpu"
    exchange: str = "auto"
    exchange_payload: str = "auto"
    overlap: str = "auto"
    kernels: str = "auto"
    batch_invariant: bool = False
    graphs: GraphOptions = field(default_factory=GraphOptions)
    eplb: str = "off"
    eplb_load: bytes = b""
    eplb_slots: bytes = b""

    def engine_config(self, checkpoint: Path) -> EngineConfig:
        """Return the resolved configuration that a worker gets."""
        return EngineConfig(
            model=ModelOptions(
                model=checkpoint.name,
                path=str(checkpoint),
                dtype=self.dtype,
                quantization=self.quantization,
                load_format=self.load_format,
                max_model_len=self.max_model_len,
            ),
            parallel=ParallelOptions(
                topology=parse_topology(self.topology).long(),
                device=self.device,
                ranks="threads",
                threads=1,
                exchange=self.exchange,
                exchange_payload=self.exchange_payload,
                overlap=self.overlap,
                kernels=self.kernels,
                batch_invariant=self.batch_invariant,
                eplb=self.eplb,
                eplb_load=self.eplb_load,
                eplb_slots=self.eplb_slots,
            ),
            cache=CacheOptions(
                block_size=self.block_size, num_blocks=self.num_blocks, kv_cache_dtype=self.kv_cache_dtype
            ),
            schedule=ScheduleOptions(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                policy=self.policy,
            ),
            graphs=self.graphs,
        )

    def exchange_rule(self) -> ExchangeRule:
        """Return what joins the ranks of a group, which are threads."""
        return exchange_rule(self.engine_config(Path("any")), parse_topology(self.topology), has_native=False)

    def scheduler_config(self, model: ModelConfig) -> SchedulerConfig:
        """Return the limits that the scheduler plans within: those of a worker, or tighter ones."""
        limits = step_limits(self.engine_config(Path("any")), otherwise=model.max_position_embeddings)
        dtype = model.dtype if self.dtype == "auto" else self.dtype
        held = parse_kv_format(self.kv_cache_dtype, parse_format(dtype))
        layout = kv_layout(kv_groups(model, dtype=held), limits, self.num_blocks)
        groups = tuple(
            replace(group, num_blocks=min(group.num_blocks, self.window_blocks or group.num_blocks))
            if group.is_windowed
            else group
            for group in layout.groups
        )
        config, rule = self.engine_config(Path("any")), self.exchange_rule()
        load = moe_load(model_footprint(model, name="any", dtype=dtype))
        return SchedulerConfig(
            num_ranks=parse_topology(self.topology).adp,
            groups=groups,
            block_size=self.block_size,
            max_model_len=layout.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_chunk_tokens=self.max_chunk_tokens,
            policy=self.policy,
            exchange_rule=rule,
            overlap_facts=overlap_facts(config, rule.grid, load),
            eos_token_ids=model.eos_token_ids if self.eos_token_ids is None else self.eos_token_ids,
        )
