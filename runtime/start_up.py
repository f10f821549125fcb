"""What an engine concludes from what its ranks found while loading: enough KV or not, and how patient to be.

Not the start-up itself (runtime/engine_main.py). Pure but for log lines.
Units: blocks, tokens, seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from .kv_layout import kv_layout, step_limits
from .messages import KVAllocated, Loaded
from .processes.launch import EngineStart
from .processes.supervision import Limits, predicted_layer_s

log = logging.getLogger(__name__)

# Ten minutes, as torch gives NCCL: a rank that its supervisor has lost sight of gives up then, and a group that
# somebody suspended for less goes on. Who watches steps is the supervisor, within seconds.
_SERVING_TIMEOUT_S, _TIMES_AS_PATIENT = 600.0, 4.0


def check_blocks(start: EngineStart, num_blocks: int) -> None:
    """Refuse a KV pool that holds nothing, or less than a length that was asked for.

    Raises:
        ValueError: names the numbers and the fix.
    """
    wanted = start.config.model.max_model_len
    if num_blocks < 1:
        raise ValueError(
            "no memory is left for KV (0 blocks); give --kv-cache-memory-bytes, or use more ranks or a smaller model"
        )
    longest = kv_layout(start.kv_groups, step_limits(start.config), num_blocks).max_model_len
    if wanted is None or longest >= wanted:
        return
    if start.fixed_max_model_len:
        raise ValueError(
            f"KV of {num_blocks} blocks holds {longest} tokens, less than max_model_len={wanted}; "
            f"use --max-model-len {longest} or give --kv-cache-memory-bytes more"
        )
    log.info("max_model_len: %d, lowered from %d to what KV holds", longest, wanted)


def stall_limits(start: EngineStart, ranks: Sequence[tuple[Loaded, KVAllocated]]) -> Limits:
    """Return how long a rank may stand still in a step: more where a large model meets a slow machine."""
    schedule = start.config.schedule
    layer_s = max(
        predicted_layer_s(
            weight_bytes=loaded.weight_bytes,
            num_layers=start.num_layers,
            memory_bandwidth=allocated.memory_bandwidth,
            num_rows=schedule.max_num_batched_tokens,
        )
        for loaded, allocated in ranks
    )
    return Limits(stall_s=max(schedule.stall_timeout_s, 4 * layer_s))


def collective_timeout_s(limits: Limits) -> float:
    """Return how long a collective of a served step may take: longer than the supervisor is patient, who says more."""
    return max(_SERVING_TIMEOUT_S, _TIMES_AS_PATIENT * limits.stall_s)
