"""Which exchange joins the ranks of a group in a step: a pure function of the step, the grid, and what ranks run on.

Not an exchange (moe.wide_ep.exchanges) and no look at the machine: whoever starts ranks brings the facts, the engine
chooses, the plan says what was chosen, and so every rank agrees.
Units: rows of a step on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from .grid import RankGrid
from .spec import TopologyError

AUTO = "auto"
EXCHANGES = (AUTO, "shm", "all_to_all", "hierarchical", "padded")
OVER_LINKS = ("all_to_all", "hierarchical", "padded")  # rows travel; elsewhere they are read where they lie
PAYLOADS = (AUTO, "fp8")
MOST_PADDED_ROWS = 64  # a step with more has so much room for nothing that waiting for the host costs less


@dataclass(frozen=True, kw_only=True)
class ExchangeFacts:
    """What the ranks of a group run on, and what the user asked for.

    Attributes:
        device: `cpu` or `cuda`.
        as_threads: ranks are threads of one process.
        has_native: native kernels are there, which `shm` needs.
        asked: one of EXCHANGES; `auto` leaves the choice open.
        payload: one of PAYLOADS: how rows are written on a link.
        captures: decode steps are to be captured as CUDA graphs, which only an exchange of fixed shapes can be part of.
    """

    device: str = "cpu"
    as_threads: bool = False
    has_native: bool = True
    asked: str = AUTO
    payload: str = AUTO
    captures: bool = False


def choose_exchange(kind: str, bucket: int, grid: RankGrid, facts: ExchangeFacts) -> str:
    """Return the name of the exchange of a step.

    Args:
        kind: of the step over all ranks, one of `telemetry.PHASES`.
        bucket: rows of the fullest rank.
        grid: where ranks sit.
        facts: see there.

    Example:
        On one host with native kernels `shm`; where a group spans domains `hierarchical`; else `all_to_all`. `padded`
        is used only where it is asked for or graphs are captured, in decode steps of at most MOST_PADDED_ROWS rows a
        rank, beside `all_to_all`.
    """
    usual = _usual(grid, facts)
    if usual != "padded":
        return usual
    return "padded" if kind in ("decode", "idle") and bucket <= MOST_PADDED_ROWS else "all_to_all"


def exchanges_to_join(grid: RankGrid, facts: ExchangeFacts) -> tuple[str, ...]:
    """Return all that `choose_exchange` may name, which is what ranks have to join before the first step."""
    usual = _usual(grid, facts)
    return ("all_to_all", "padded") if usual == "padded" else (usual,)


def check_exchange(grid: RankGrid, facts: ExchangeFacts) -> None:
    """Refuse what was asked for where it cannot work.

    Raises:
        TopologyError: one line with the field, the value and the fix.
    """
    if grid.topology.ep == 1:
        return
    where = f"exchange={facts.asked!r}"
    if facts.asked == "hierarchical" and not grid.spans_domains:
        raise TopologyError(
            f"{where} needs a group that spans domains; add them, like EP4DP1[domains=2+2], or use auto"
        )
    if facts.asked == "shm":
        if facts.as_threads or facts.device != "cpu" or not facts.has_native:
            raise TopologyError(f"{where} needs ranks that are processes on a CPU with native kernels; use auto")
        if grid.spans_domains:
            raise TopologyError(f"{where} is for one domain; use hierarchical or all_to_all, or leave domains out")
        if facts.payload != AUTO:
            raise TopologyError(
                f"exchange_payload={facts.payload!r} is for rows on a link, and {where} has none; leave one of them out"
            )


def _usual(grid: RankGrid, facts: ExchangeFacts) -> str:
    """Return what every step uses, or `padded` where some do."""
    if grid.topology.ep == 1:
        return "local"
    if facts.asked != AUTO:
        return facts.asked
    if grid.spans_domains:
        return "hierarchical"
    if facts.captures:
        return "padded"
    if facts.payload != AUTO:
        return "all_to_all"
    if facts.as_threads:
        return "threads"
    return "shm" if facts.device == "cpu" and facts.has_native else "all_to_all"


@dataclass(frozen=True, kw_only=True)
class ExchangeRule:
    """`choose_exchange` for one group."""

    grid: RankGrid
    facts: ExchangeFacts

    def name(self, kind: str, bucket: int) -> str:
        """Return the name of the exchange of a step."""
        return choose_exchange(kind, bucket, self.grid, self.facts)
