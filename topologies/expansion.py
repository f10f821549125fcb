"""What a topology means, in words: printed before every start so that nobody has to guess what `DP` counts.

Not a drawing of ranks (grid.py) and not bytes (budget.py).
Units: ranks (GPUs when each rank has one), expert slots.
"""

from __future__ import annotations

from itertools import groupby

from .grid import slot_ranges
from .spec import Topology


def expansion(topology: Topology, *, num_experts: int | None = None, unit: str = "rank") -> str:
    """Return a few lines that spell `topology` out.

    Args:
        topology: what to explain.
        num_experts: E of the model; None explains without numbers, 0 says that the model is dense.
        unit: what to call a rank, e.g. `GPU`.

    Example:
        >>> print(expansion(make_topology(2), num_experts=16))
        EP2DP1[adp=2,atp=1,red=0]
          ranks      2 = 1 replica x 2 ranks in an expert-parallel group
          attention  data parallel over 2 ranks: each owns its requests and their KV
          experts    16 over 2 ranks: 8 slots each; each replica holds every expert once
    """
    lines = [
        topology.long(),
        f"  {unit}s".ljust(13)
        + f"{topology.num_ranks:,} = {_count(topology.dp, 'replica')} x {_count(topology.ep, unit)} "
        + "in an expert-parallel group",
        f"  attention  {_attention(topology, unit)}",
        f"  experts    {_experts(topology, num_experts, unit)}",
    ]
    if topology.domains:
        lines.append(f"  domains    {_domains(topology, unit)}")
    if topology.dp > 1:
        lines.append("  replicas   independent: nothing synchronises between them; requests are balanced over them")
    return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _attention(topology: Topology, unit: str) -> str:
    if topology.ep == 1:
        return f"on the one {unit} of a replica"
    if topology.atp == 1:
        return f"data parallel over {_count(topology.adp, unit)}: each owns its requests and their KV"
    if topology.adp == 1:
        return f"heads sharded over {_count(topology.atp, unit)} (atp={topology.atp})"
    return f"data parallel over {topology.adp} parts of {_count(topology.atp, unit)}, heads sharded inside a part"


def _domains(topology: Topology, unit: str) -> str:
    text = f"{' + '.join(map(str, topology.domains))} {unit}s of a group"
    slowed = [f"{topology.rate:,} MB/s"] * bool(topology.rate) + [f"a delay of {topology.delay:,} us"] * bool(
        topology.delay
    )
    return text + (f"; the link between them is slowed to {' and '.join(slowed)}" if slowed else "")


def _experts(topology: Topology, num_experts: int | None, unit: str) -> str:
    redundant = f" + {topology.red} redundant" if topology.red else ""
    once = "each replica holds every expert once" + (f" and {_count(topology.red, 'redundant slot')}" * bool(redundant))
    if num_experts is None:
        return f"{once}; (experts{redundant}) / {topology.ep} slots a {unit}"
    if num_experts == 0:
        return "none: the model is dense"
    sizes = [stop - start for start, stop in slot_ranges(num_experts + topology.red, topology.ep)]
    slots = f"{sizes[0]} slots each" if min(sizes) == max(sizes) else _uneven(sizes)
    return f"{num_experts}{redundant} over {_count(topology.ep, unit)}: {slots}; {once}"


def _uneven(sizes: list[int]) -> str:
    """Say which ranks hold how many slots."""
    parts, start = [], 0
    for size, equal in groupby(sizes):
        stop = start + len(list(equal))
        ranks = f"ranks {start}-{stop - 1}" if stop - start > 1 else f"rank {start}"
        parts.append(f"{size} slots on {ranks}")
        start = stop
    return ", ".join(parts)
