"""What follows from "N blocks of KV": the limits of cache groups and scheduler, and the longest sequence.

Not sizes themselves (topologies/kv_sizes.py) and not a decision about N (runtime/resolve.py). Engine, ranks and client
all ask here, so that none of them works it out a second time. No model and no torch: an engine imports neither.
Units: tokens, blocks; per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..topologies.kv_sizes import KVGroup, StepLimits, group_blocks, longest_sequence
from ..topologies.spec import parse_topology
from .config import EngineConfig
from .scheduling.limits import GroupLimits, SchedulerConfig

UNBOUNDED = 1 << 30


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """KV of a rank.

    Attributes:
        groups: one for each cache group of the model.
        max_model_len: longest sequence that fits, prompt and output.
    """

    groups: tuple[GroupLimits, ...]
    max_model_len: int

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Blocks of each group."""
        return tuple(group.num_blocks for group in self.groups)


def step_limits(config: EngineConfig, *, otherwise: int = UNBOUNDED) -> StepLimits:
    """Return the limits that cost bytes; `otherwise` is the length where nobody set one (a resolved config has it)."""
    return StepLimits(
        max_num_batched_tokens=config.schedule.max_num_batched_tokens,
        max_model_len=config.model.max_model_len or otherwise,
        max_num_seqs=config.schedule.max_num_seqs,
        block_size=config.cache.block_size,
        moves_experts=config.parallel.eplb.strip() == "auto",
        graph_bytes=config.graphs.graph_bytes,
        has_tables=config.parallel.device.startswith("cuda") and config.parallel.kernels != "torch",
    )


def kv_layout(groups: Sequence[KVGroup], limits: StepLimits, num_blocks: int) -> KVLayout:
    """Return what `num_blocks` blocks (of a group that keeps whole sequences) make of `groups`."""
    sizes = group_blocks(groups, limits, num_blocks)
    return KVLayout(
        groups=tuple(
            GroupLimits(num_blocks=size, kind=group.kind, window=group.window)
            for group, size in zip(groups, sizes, strict=True)
        ),
        max_model_len=longest_sequence(groups, limits, num_blocks),
    )


def scheduler_limits(config: EngineConfig, groups: Sequence[KVGroup], *, num_blocks: int) -> SchedulerConfig:
    """Return what the ranks of a replica with `num_blocks` blocks each are planned within.

    Ranks that divide heads hold the same sequences and count as one. Exchange and end tokens are left to the engine.
    """
    schedule, limits = config.schedule, step_limits(config)
    layout = kv_layout(groups, limits, num_blocks)
    return SchedulerConfig(
        num_ranks=parse_topology(config.parallel.topology).adp,
        groups=layout.groups,
        block_size=limits.block_size,
        max_model_len=layout.max_model_len,
        max_num_seqs=schedule.max_num_seqs,
        max_num_batched_tokens=schedule.max_num_batched_tokens,
        policy=schedule.policy,
        max_queued_requests=schedule.max_queued_requests,
    )
