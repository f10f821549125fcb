"""What each layout of a machine would make of a window: the model of step time, scaled by what that window showed.

Not a decision (advisor.py): one window in, candidates out, no memory. How a step is taken apart and scaled is in
docs/advisor.md. Units: seconds of the mean rank, bytes; parts of a step are of the window's mix of phases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..budget import format_bytes
from ..cost import StepCost, Workload
from ..machine import layouts
from ..planner.routing import random_imbalance
from ..spec import Topology, parse_topology
from .change_cost import budget_of, change_cost, context_of
from .forecast import chances_of, exchange_of, forecast, link_figure
from .records import Calibration, Candidate, Facts, Observation, PhaseSeen

# What one window may make of the model: beyond that something else is wrong.
_EXCHANGE_SCALES, _MOST_WAIT = (0.01, 20.0), 3.0
# What kernels may take over what bytes and operations explain. On a CPU one native call runs all layers, so what is
# left is kernels that read slower than a plain loop (a quarter of its rate, decision 029); on a GPU it is launches.
_MOST_PRODUCTS = {"cpu": 5.0, "cuda": 1.0}


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """All layouts, best first; `here` is the one that runs, `excluded` those that cannot hold the load, and why."""

    candidates: tuple[Candidate, ...]
    here: Candidate
    calibration: Calibration
    excluded: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """A mean step of a layout, before it is scaled."""

    products_s: float = 0.0
    routed_s: float = 0.0
    within_s: float = 0.0
    between_s: float = 0.0
    wait_s: float = 0.0
    host_s: float = 0.0
    routed_bytes: float = 0.0

    @property
    def exchange_s(self) -> float:
        return self.within_s + self.between_s

    def plus(self, other: _Parts, times: float) -> _Parts:
        """Return this and `times` steps like `other`."""
        return _Parts(**{name: value + times * getattr(other, name) for name, value in vars(self).items()})


def rank_layouts(facts: Facts, seen: Observation) -> Ranking:
    """Return what each layout would make of a window in which something ran."""
    assert seen.num_steps > 0, "nothing ran"
    here = parse_topology(facts.topology)
    own = _parts(facts, seen, here)
    calibration = _calibrate(seen, own, facts.machine.exchange.device)
    current = _candidate(facts, here, own, own, calibration)
    found, excluded = [current], []
    for topology in _others(facts, here):
        why, sequences = _room(facts, topology, seen)
        if why:
            excluded.append((topology.long(), why))
            continue
        parts = _parts(facts, seen, topology)
        made = _candidate(facts, topology, parts, own, calibration)
        cost = change_cost(facts, seen, topology, made.restart_s)
        gain = current.step_s / made.step_s - 1
        found.append(replace(made, gain=gain, sequences=sequences, **vars(cost)))
    current = replace(current, sequences=_room(facts, here, seen)[1])
    found[0] = current
    found.sort(key=lambda one: (-one.gain, one.topology != facts.topology, one.topology))
    return Ranking(candidates=tuple(found), here=current, calibration=calibration, excluded=tuple(excluded))


def _others(facts: Facts, here: Topology) -> list[Topology]:
    """Return the other layouts; heads stay divided as they are, spare slots stay as many as help."""
    found = []
    for topology in layouts(facts.footprint, facts.machine, most_atp=here.atp):
        if topology.atp != min(here.atp, topology.ep) or (topology.ep, topology.dp) == (here.ep, here.dp):
            continue
        red = min(here.red, facts.footprint.num_experts * (topology.ep - 1))
        found.append(facts.machine.placed(replace(topology, red=red)))
    return found


def _room(facts: Facts, topology: Topology, seen: Observation) -> tuple[str, int]:
    """Return why a layout cannot hold what runs (empty: it can), and how many sequences of that length it holds."""
    budget = budget_of(facts, topology)
    memory = budget.rank_memory_bytes
    if budget.total > memory or budget.longest_sequence < 2:
        return f"a rank needs {format_bytes(budget.fixed_bytes)} beside KV and may use {format_bytes(memory)}", 0
    context = context_of(facts, seen)
    holds = budget.max_concurrency(context)
    if holds < seen.running:
        return f"KV holds {holds} sequences of {context} tokens, and {seen.running:.0f} run", holds
    return "", holds


def _parts(facts: Facts, seen: Observation, topology: Topology) -> _Parts:
    """Return a mean step of a layout."""
    total = _Parts()
    for phase in seen.phases:
        total = total.plus(_phase_parts(facts, seen, topology, phase), phase.steps / seen.num_steps)
    return total


def _phase_parts(facts: Facts, seen: Observation, topology: Topology, phase: PhaseSeen) -> _Parts:
    here, machine, footprint = parse_topology(facts.topology), facts.machine, facts.footprint
    load = Workload(rows=phase.rows, context=math.ceil(seen.context))
    chances = chances_of(footprint, seen.popularity)
    now, then = (forecast(footprint, each, load, machine, chances=chances) for each in (here, topology))
    ceilings = machine.rank_ceilings(topology.num_ranks)
    rows = here.num_ranks * topology.atp / (topology.num_ranks * here.atp)  # of a rank, over those that it has now
    routed = phase.routed_bytes * _ratio(now, then, "expert_bytes")
    held = (
        1.0 / ceilings.memory_bandwidth
    )  # of a cache, too, bytes take their time; the scale of products says how much
    others = phase.weight_bytes * _ratio(now, then, "shared_bytes") + phase.kv_bytes * _ratio(now, then, "kv_bytes")
    if facts.experts is not None:
        # Ranks of a host share its memory and cores: with fewer of them each is faster.
        slower = topology.num_ranks / here.num_ranks if machine.is_shared else 1.0
        routed_s = facts.experts.seconds(routed, phase.routed_flops * rows) * slower
    else:
        routed_s = routed * held + phase.routed_flops * rows / ceilings.flops
    others_s = others * held + max(0.0, phase.flops - phase.routed_flops) * rows / ceilings.flops
    uneven = dict(seen.imbalances).get(topology.ep, 1.0)
    pairs = phase.rows / topology.dp * footprint.top_k
    uneven = float(min(topology.ep, uneven * random_imbalance(pairs, topology.ep)))
    return _Parts(
        products_s=float(routed_s + others_s),
        routed_s=float(routed_s),
        within_s=then.within_seconds,
        between_s=then.between_seconds,
        wait_s=float(routed_s) * (uneven - 1) if footprint.num_experts else 0.0,
        host_s=phase.host_s,
        routed_bytes=routed,
    )


def _ratio(now: StepCost, then: StepCost, name: str) -> float:
    here = getattr(now, name)
    return float(getattr(then, name) / here) if here > 0 else 1.0


def _calibrate(seen: Observation, own: _Parts, device: str) -> Calibration:
    steps = seen.num_steps
    busy, host = (sum(p.steps * getattr(p, name) for p in seen.phases) / steps for name in ("busy_s", "host_s"))
    link, wait = min(seen.link_s / steps, busy), min(seen.wait_s / steps, busy)
    kernels = max(0.0, busy - link - wait - host)
    products = min(_MOST_PRODUCTS.get(device, 1.0), kernels / own.products_s) if own.products_s > 0 else 1.0
    least, most = _EXCHANGE_SCALES
    scale = min(most, max(least, link / own.exchange_s)) if own.exchange_s > 0 and link > 0 else 1.0
    waiting = min(_MOST_WAIT, wait / own.wait_s) if own.wait_s > 0 else 1.0
    return Calibration(
        observed_s=link + wait + kernels + host,
        predicted_s=own.products_s + own.exchange_s + own.wait_s,
        products=products,
        rest_s=max(0.0, kernels - products * own.products_s),
        exchange=scale,
        wait=waiting,
        meet_s=max(0.0, link + wait - scale * own.exchange_s - waiting * own.wait_s),
    )


def _candidate(facts: Facts, topology: Topology, parts: _Parts, own: _Parts, calibration: Calibration) -> Candidate:
    here = parse_topology(facts.topology)
    same = exchange_of(facts.machine, topology) == exchange_of(facts.machine, here)
    scale = calibration.exchange if same else 1.0
    products = calibration.products * parts.products_s
    exchange = scale * parts.exchange_s
    meeting = calibration.meet_s if topology.ep > 1 else 0.0
    step = products + exchange + calibration.wait * parts.wait_s + meeting + parts.host_s + calibration.rest_s
    figure = link_figure(facts.machine, topology)
    load_bytes = topology.num_ranks * budget_of(facts, topology).of_kind("weights")
    more = load_bytes / facts.weight_bytes if facts.weight_bytes else 1.0
    return Candidate(
        topology=topology.long(),
        step_s=step,
        gain=0.0,
        exchange_share=exchange / step if step > 0 else 0.0,
        between_share=scale * parts.between_s / step if step > 0 else 0.0,
        routed_ratio=parts.routed_bytes / own.routed_bytes if own.routed_bytes > 0 else 1.0,
        products_s=products,
        restart_s=facts.start_s * max(1.0, more),
        load_bytes=load_bytes,
        sequences=0,
        is_measured=topology.ep == 1 or (figure is not None and figure.is_measured),
    )
