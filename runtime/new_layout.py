"""What a change of layout would run, and in which turns: beside what runs where there is room, else in its places.

Not the change (server/http/layout_change.py). It looks at the memory that is free now. Units: bytes, tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from ..topologies import Topology, TopologyError
from ..topologies.advisor.turns import BESIDE, IN_TURNS, Turn, beside, in_turns
from .auto_topology import emulated_domains
from .config import EngineConfig
from .resolve import OtherMemory, Resolved, rank_memory_bytes, resolve

log = logging.getLogger(__name__)


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


def new_layout(
    running: Resolved, topology: Topology, *, least_model_len: int, lengths: Sequence[int] = ()
) -> NewLayout:
    """Return how `topology` takes the place of what runs.

    Args:
        running: what runs.
        topology: the layout to change to.
        least_model_len: sequences that clients may send now, in tokens; they must fit then, too.
        lengths: of the sequences that run and wait, as long as they are expected to become. As many of them as fit into
            the KV that runs must fit into the new one.

    Raises:
        ValueError: it cannot run, or nobody would serve meanwhile; one line with the fix.
    """
    config = _config(running, topology)
    taken = running.budget.total * running.topology.num_ranks
    is_shared = config.parallel.device == "cpu"
    no_room = ""
    if is_shared:
        try:
            resolved = resolve(config, others=OtherMemory(kept_bytes=taken))
            _check_load(running, resolved, least_model_len, lengths)
            # What a rank may use once the old ones have ended; the advisor works with that.
            memory = rank_memory_bytes(resolved.config.cache, topology, OtherMemory(freed_bytes=taken))
            budget = replace(resolved.budget, rank_memory_bytes=max(memory, resolved.budget.total))
            _say_kv(running, resolved)
            resolved = replace(resolved, budget=budget)
            return NewLayout(resolved=resolved, way=BESIDE, turns=beside(running.topology, topology))
        except TopologyError as error:
            no_room = str(error)  # whatever else is wrong with it shows below
    resolved = resolve(config, others=OtherMemory(freed_bytes=taken))
    _check_load(running, resolved, least_model_len, lengths)
    try:
        turns = in_turns(running.topology, topology, is_shared=is_shared)
    except TopologyError as error:
        raise TopologyError(f"{error} (no room beside what runs: {no_room})" if no_room else str(error)) from None
    _say_kv(running, resolved)
    return NewLayout(resolved=resolved, way=IN_TURNS, turns=turns)


def _config(running: Resolved, topology: Topology) -> EngineConfig:
    """Return what was asked for, with another layout."""
    asked = running.asked
    parallel = msgspec.structs.replace(asked.parallel, topology=topology.long())
    if (places := emulated_domains(running.config.parallel)) is not None and parallel.domains is None:
        # The machine stays what it was, whatever the new topology says of it.
        link = "".join(f",{name}={getattr(places, name)}" for name in ("rate", "delay") if getattr(places, name))
        parallel = msgspec.structs.replace(parallel, domains="+".join(map(str, places.domains)) + link)
    return msgspec.structs.replace(asked, parallel=parallel)


def _check_load(running: Resolved, resolved: Resolved, least_model_len: int, lengths: Sequence[int]) -> None:
    """Refuse a layout that does not hold what clients may send, or less of what they have sent than what runs does.

    Raises:
        TopologyError: names both figures and the fix.
    """
    name, budget = resolved.topology.short(), resolved.budget
    if budget.longest_sequence < least_model_len:
        raise TopologyError(
            f"{name} holds sequences of {budget.longest_sequence} tokens, and clients may send {least_model_len}; "
            f"restart the server with --topology {name} and --max-model-len"
        )
    now, then = running.budget.sequences_held(lengths), budget.sequences_held(lengths)
    if then < now:
        raise TopologyError(
            f"KV of {name} holds {then} of the {len(lengths)} sequences that run and wait, and {now} of them fit now; "
            f"try again with fewer, or restart the server with --topology {name}"
        )


def _say_kv(running: Resolved, resolved: Resolved) -> None:
    """Let the log say so where later load finds less KV than there was."""
    length = running.budget.limits.max_model_len
    before, after = (one.budget.max_concurrency(length) for one in (running, resolved))
    if after < before:
        log.warning(
            "layout: KV of %s holds %d sequences of %d tokens, and %d fitted before",
            resolved.topology.short(), after, length, before,
        )  # fmt: skip
