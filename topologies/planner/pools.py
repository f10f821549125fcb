"""From a layout to a pool that can be planned with: its byte budget, and how many sequences its KV holds.

Not a second budget: it asks topologies/budget.py, so that a plan and a start say the same. Units: bytes, tokens, ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .. import kv_sizes
from ..budget import ByteBudget, byte_budget, check_fits, check_runnable
from ..grid import RankGrid
from ..kv_sizes import StepLimits
from ..spec import Topology, TopologyError
from .architecture import Architecture
from .serving import Pool, Workload
from .step_time import Setting

BLOCK_SIZE = 16
UTILIZATION = 0.9  # of a device's memory, as `moewe serve` takes it
# Rows of prompts in a step that keep a GPU busy, and few enough that worst-case exchange buffers stay small.
CHUNK = 1024


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A layout with its budget.

    Attributes:
        pool: what serving is worked out of.
        budget: bytes of the fullest rank.
        grid: ranks on domains.
    """

    pool: Pool
    budget: ByteBudget
    grid: RankGrid


def plan_pool(
    setting: Setting,
    workload: Workload,
    *,
    chunk: int = CHUNK,
    utilization: float = UTILIZATION,
    decodes: bool = True,
) -> Planned:
    """Return the pool of `setting`, or refuse it.

    Args:
        setting: model, layout and machine.
        workload: sequences that a rank has to hold.
        chunk: most rows of prompts in a step on an attention replica.
        utilization: part of a device's memory that may be used.
        decodes: sequences stay until their answers end; else until their prompts are computed.

    Raises:
        TopologyError: the model cannot be laid out so, or does not fit; one line with the fix.
    """
    topology, footprint = setting.topology, setting.model.footprint
    check_runnable(topology, num_experts=footprint.num_experts)
    if topology.atp not in setting.model.possible_atp():
        near = [atp for atp in setting.model.possible_atp() if topology.ep % atp == 0]
        raise TopologyError(
            f"{topology.long()}: the heads of {footprint.name} (or blocks of its quantised matrices) do not divide "
            f"into atp={topology.atp}; use one of {', '.join(map(str, near))}"
        )
    length = workload.isl + (workload.osl if decodes else 0)
    if length > footprint.max_model_len:
        raise TopologyError(
            f"workload: isl and osl are {length:,} tokens, more than {footprint.name} was made for; use at most "
            f"{footprint.max_model_len:,}"
        )
    servers = topology.adp * topology.dp
    most = math.ceil(workload.concurrency / servers)
    rows = max(chunk, most * (1 + workload.drafts)) if decodes else chunk
    limits = StepLimits(
        max_num_batched_tokens=rows,
        max_model_len=length,
        max_num_seqs=most,
        block_size=BLOCK_SIZE,
        has_tables=not setting.hardware.is_shared,
    )
    memory = setting.hardware.memory_bytes * utilization / (topology.num_ranks if setting.hardware.is_shared else 1)
    budget = byte_budget(footprint, topology, limits, rank_memory_bytes=int(memory))
    check_fits(budget, host_bytes=int(memory * topology.num_ranks) if setting.hardware.is_shared else None)
    holds = kv_sizes.max_concurrency(budget.kv_groups, limits, budget.num_blocks, length)
    return Planned(
        pool=Pool(setting=setting, chunk=chunk, most_sequences=holds),
        budget=budget,
        grid=RankGrid(topology, setting.hardware.domain_size),
    )


def divisibility(topology: Topology, model: Architecture) -> str:
    """Say how slots divide over ranks, and where groups of experts, which a row chooses few of, stand."""
    num_experts, groups = model.footprint.num_experts, model.num_groups
    if not num_experts:
        return "dense: nothing to divide"
    slots = num_experts + topology.red
    even = "evenly" if slots % topology.ep == 0 else f"unevenly, {slots % topology.ep} ranks hold one more"
    text = f"{slots} slots over {topology.ep} ranks: {even}"
    if groups > 1:
        text += f"; a row goes to {model.top_groups} of {groups} groups of experts, "
        if topology.red:
            text += "which replicas may leave"
        elif groups % topology.ep == 0:
            text += f"{groups // topology.ep} whole ones on a rank"
        elif topology.ep % groups == 0 and num_experts % topology.ep == 0:
            text += f"each on {topology.ep // groups} ranks of its own"
        else:
            text += "which share ranks"
    return text
