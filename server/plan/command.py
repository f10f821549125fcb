"""The command `moewe plan`: what a layout takes on a machine.

Not the planning (topologies/planner/): it reads what is asked, and prints. Units: as in record.py.
"""

from __future__ import annotations

import json
from typing import Any

from ...topologies.planner.pools import Planned, plan_pool
from ...topologies.planner.serving import Served, serve
from ...topologies.planner.step_time import CONSTANTS, MEASURED, Setting
from ...topologies.spec import Topology, TopologyError
from ..terminal.stdout import put
from .inputs import Asked, read_asked
from .record import plan_record
from .view import plan_text

PREFILL, DECODE = "prefill", "decode"


def plan(settings: Any) -> int:
    """Run the command; returns the exit code."""
    tool = settings.tool | {"dialect": settings.shared.get("dialect")}
    asked = read_asked(tool)
    pools, served = plan_layout(asked)
    record = plan_record(asked, pools, served)
    put(json.dumps(record, indent=2) + "\n" if tool.get("json") else plan_text(record))
    return 0


def plan_layout(asked: Asked) -> tuple[dict[str, Planned], Served]:
    """Return the pools of the layout that was asked for, and what users get.

    Raises:
        TopologyError: a layout that cannot be planned, or does not fit.
    """
    assert asked.layout is not None
    layouts = asked.layout.pools
    if len(layouts) == 1:
        ((name, topology),) = layouts.items()
        planned = plan_pool(
            setting_of(asked, topology), asked.workload, chunk=asked.chunk, utilization=asked.utilization
        )
        return {name: planned}, serve(planned.pool, asked.workload)
    if set(layouts) != {PREFILL, DECODE}:
        raise TopologyError(
            f"the layout has the pools {', '.join(layouts)}; a plan takes one pool, or `{PREFILL}: .. | {DECODE}: ..`"
        )
    pools = {
        name: plan_pool(
            setting_of(asked, layouts[name]),
            asked.workload,
            chunk=asked.chunk if name == PREFILL else 1,
            utilization=asked.utilization,
            decodes=name == DECODE,
        )
        for name in (PREFILL, DECODE)
    }
    return pools, serve(pools[DECODE].pool, asked.workload, pools[PREFILL].pool)


def setting_of(asked: Asked, topology: Topology) -> Setting:
    """Return what steps on `topology` have in common."""
    return Setting(
        model=asked.model,
        topology=topology,
        hardware=asked.hardware,
        popularity=asked.popularity,
        overlap=asked.overlap,
        constants=MEASURED if asked.hardware.is_shared else CONSTANTS,
    )
