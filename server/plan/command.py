"""The command `moewe plan`: what a layout takes on a machine.

Not the planning (topologies/planner/): it reads what is asked, and prints. Units: as in record.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...topologies.planner.pools import Planned, plan_pool
from ...topologies.planner.search import Space, search
from ...topologies.planner.serving import Served, serve
from ...topologies.planner.step_time import CONSTANTS, MEASURED, Setting
from ...topologies.spec import Topology, TopologyError, make_topology
from ..bench.plot import check_format, require
from ..terminal.stdout import put
from .found import search_record, search_text
from .inputs import Asked, read_asked
from .picture import draw_front
from .record import plan_record
from .view import plan_text

PREFILL, DECODE = "prefill", "decode"
DEFAULT_TOP = 12


def plan(settings: Any) -> int:
    """Run the command; returns the exit code."""
    tool = settings.tool | {"dialect": settings.shared.get("dialect")}
    asked = read_asked(tool)
    if asked.layout is None:
        return find(asked, tool)
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


def find(asked: Asked, tool: Mapping[str, Any]) -> int:
    """Search, and print what was found."""
    picture = Path(tool["plot"]) if "plot" in tool else None
    most = tool.get("top", DEFAULT_TOP)
    if most < 1:
        raise ValueError(f"--top {most} is not allowed; use at least 1")
    if picture is not None:
        check_format(picture)
        require("matplotlib", "--plot")
    if asked.hardware.is_shared:
        raise TopologyError(f"--search is for GPUs, and {asked.hardware.name} is one host; see --topology auto")
    space = Space(
        models=asked.models,
        setting=setting_of(asked, make_topology(1)),
        num_gpus=asked.num_gpus,
        workload=asked.workload,
        utilization=asked.utilization,
    )
    record = search_record(asked, search(space, asked.targets), most)
    if picture is not None:
        draw_front(record, picture)
    put(json.dumps(record, indent=2) + "\n" if tool.get("json") else search_text(record))
    return 0


def setting_of(asked: Asked, topology: Topology) -> Setting:
    """Return what steps on `topology` have in common."""
    return Setting(
        model=asked.model,
        topology=topology,
        hardware=asked.hardware,
        popularity=asked.popularity,
        overlap=asked.overlap,
        constants=MEASURED if asked.hardware.is_shared else CONSTANTS,
        link=asked.link(topology),
    )
