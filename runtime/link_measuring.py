"""Measures the links of a group at its start: the engine asks for probes, and all ranks make them together.

Not what to probe (topologies/link_probes.py) and not the timing (moe/probing.py). Units: seconds.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from ..topologies.exchange_choice import ExchangeRule, exchanges_to_join
from ..topologies.exchange_cost import MeasuredLinks
from ..topologies.link_probes import BUDGET_S, LinkProbe, Probing, RankFound, found_by, probe_links
from ..topologies.overlap_choice import OverlapFacts
from .config import QUICK_VARIABLE
from .messages import LinksProbed, ProbeLinks
from .processes.workers import Workers

log = logging.getLogger(__name__)


def probing(rule: ExchangeRule, facts: OverlapFacts, most_rows: int) -> Probing | None:
    """Return what asks for the probes of a group; None where no rows of experts travel.

    Args:
        rule: of its exchanges.
        facts: what is assumed where nothing was measured.
        most_rows: of an attention replica in a step.
    """
    topology = rule.grid.topology
    if topology.ep == 1 or facts.load is None:
        return None
    names = exchanges_to_join(rule.grid, rule.facts)
    budget_s = 0.0 if os.environ.get(QUICK_VARIABLE) else BUDGET_S
    return probe_links(names, facts, most_rows=max(1, most_rows // topology.atp), budget_s=budget_s)


class LinkMeasuring:
    """The probes of one group, one after another.

    Args:
        workers: its ranks.
        probing: asks for probes; None: there is nothing to measure.
        clock: seconds.

    Attributes:
        links: what was found; None before the end, and where there is nothing to measure.
        is_done: no rank has anything to answer any more.
    """

    def __init__(self, workers: Workers, probing: Probing | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._workers, self._probing, self._clock = workers, probing, clock
        self._found: dict[int, RankFound] = {}
        self._asked = 0.0
        self.links: MeasuredLinks | None = None
        self.is_done = probing is None

    def begin(self) -> None:
        """Ask for the first probe; all ranks are warm."""
        if self._probing is not None:
            self._ask(next(self._probing))

    def take(self, message: LinksProbed) -> None:
        """Take the answer of a rank; the last one leads to the next probe, or to the end."""
        self._found[message.rank] = message.found
        if len(self._found) < self._workers.num_ranks:
            return
        assert self._probing is not None, "nobody asked"
        ranks = [found for _, found in sorted(self._found.items())]
        self._found = {}
        try:
            self._ask(self._probing.send(found_by(ranks, self._clock() - self._asked)))
        except StopIteration as end:
            self.links, self.is_done = end.value, True
            for line in end.value.lines():
                log.info("%s", line)

    def _ask(self, probe: LinkProbe) -> None:
        self._asked = self._clock()
        self._workers.broadcast(ProbeLinks(probe=probe))
