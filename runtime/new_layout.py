"""What a change of layout would run, and in which turns: beside what runs where there is room, else in its places.

Not the change (server/http/layout_change.py). It looks at the memory that is free now. Units: bytes, tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from ..topologies import Topology, TopologyError
from ..topologies.advisor.turns import BESIDE, IN_TURNS, Turn, beside, in_turns
from .auto_topology import emulated_domains
from .resolve import Resolved, resolve


@dataclass(frozen=True, kw_only=True)
class NewLayout:
    """What takes the place of what.

    Attributes:
        resolved: what will run.
        way: BESIDE or IN_TURNS.
        turns: see there.
    """

    resolved: Resolved
    way: str
    turns: tuple[Turn, ...]


def new_layout(running: Resolved, topology: Topology, *, least_model_len: int) -> NewLayout:
    """Return how `topology` takes the place of what runs.

    Args:
        running: what runs.
        topology: the layout to change to.
        least_model_len: sequences that clients may send now, in tokens; they must fit then, too.

    Raises:
        ValueError: it cannot run, or nobody would serve meanwhile; one line with the fix.
    """
    asked = running.asked
    parallel = msgspec.structs.replace(asked.parallel, topology=topology.long())
    if (places := emulated_domains(running.config.parallel)) is not None and parallel.domains is None:
        # The machine stays what it was, whatever the new topology says of it.
        link = "".join(f",{name}={getattr(places, name)}" for name in ("rate", "delay") if getattr(places, name))
        parallel = msgspec.structs.replace(parallel, domains="+".join(map(str, places.domains)) + link)
    config = msgspec.structs.replace(asked, parallel=parallel)
    if parallel.device == "cpu":
        try:
            resolved = resolve(config)
            if resolved.budget.longest_sequence >= least_model_len:
                return NewLayout(resolved=resolved, way=BESIDE, turns=beside(running.topology, topology))
        except TopologyError:
            pass  # no room for both; whatever else is wrong with it shows below
    turns = in_turns(running.topology, topology)
    resolved = resolve(config, freed_bytes=running.budget.total * running.topology.num_ranks)
    if resolved.budget.longest_sequence < least_model_len:
        raise TopologyError(
            f"{topology.short()} holds sequences of {resolved.budget.longest_sequence} tokens, and clients may send "
            f"{least_model_len}; restart the server with --topology {topology.short()} and --max-model-len"
        )
    return NewLayout(resolved=resolved, way=IN_TURNS, turns=turns)
