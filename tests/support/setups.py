"""How a run of the harness is set up, and the engine's and the scheduler's configuration that follow from it.

Not resolving (runtime/resolve.py): every number is given, so that a test can force preemption or odd chunks.
Units: tokens, blocks; per rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moewe.models.config import ModelConfig
from moewe.models.footprint import cache_groups
from moewe.runtime.config import CacheOptions, EngineConfig, ModelOptions, ParallelOptions, ScheduleOptions
from moewe.runtime.scheduler import SchedulerConfig
from moewe.runtime.scheduling.limits import GroupLimits
from moewe.topologies import parse_topology


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Topology, memory and limits of a run.

    Attributes:
        num_blocks: of every cache group.
        window_blocks: of cache groups with a window or chunks; None gives them `num_blocks`.
        max_chunk_tokens: bounds one prompt's share of a step; None leaves it to `max_num_batched_tokens`.
        depth: steps in flight.
        keep_logits: record the logits of every row.
        eos_token_ids: end tokens; None takes the model's.
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
    load_format: str = "auto"
    policy: str = "fcfs"
    depth: int = 2
    keep_logits: bool = True
    eos_token_ids: tuple[int, ...] | None = None

    def engine_config(self, checkpoint: Path) -> EngineConfig:
        """Return the resolved configuration that a worker gets."""
        return EngineConfig(
            model=ModelOptions(
                model=checkpoint.name,
                path=str(checkpoint),
                dtype=self.dtype,
                load_format=self.load_format,
                max_model_len=self.max_model_len,
            ),
            parallel=ParallelOptions(topology=parse_topology(self.topology).long(), ranks="threads", threads=1),
            cache=CacheOptions(block_size=self.block_size, num_blocks=self.num_blocks),
            schedule=ScheduleOptions(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                policy=self.policy,
            ),
        )

    def group_limits(self, model: ModelConfig) -> tuple[GroupLimits, ...]:
        """Return kind, window and blocks of every cache group of the model."""
        narrow = self.window_blocks or self.num_blocks
        return tuple(
            GroupLimits(num_blocks=narrow if group.window else self.num_blocks, kind=group.kind, window=group.window)
            for group in cache_groups(model, dtype=self.dtype)
        )

    def scheduler_config(self, model: ModelConfig, num_ranks: int) -> SchedulerConfig:
        """Return the limits that the scheduler plans within."""
        longest = self.max_model_len or model.max_position_embeddings
        return SchedulerConfig(
            num_ranks=num_ranks,
            groups=self.group_limits(model),
            block_size=self.block_size,
            max_model_len=min(longest, self.num_blocks * self.block_size),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_chunk_tokens=self.max_chunk_tokens,
            policy=self.policy,
            exchange="threads" if num_ranks > 1 else "local",
            eos_token_ids=model.eos_token_ids if self.eos_token_ids is None else self.eos_token_ids,
        )
