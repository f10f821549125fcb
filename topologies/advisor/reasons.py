"""What the advisor says in words: one sentence with the figures that led to it.

Not the judgement (advisor.py). Units: percent of what is named, ratios.
"""

from __future__ import annotations

from ..spec import parse_topology
from .ranking import Ranking
from .records import Candidate, Facts, Observation
from .turns import BESIDE, IN_TURNS

_HALF = (0.45, 0.55)


def what_ran(facts: Facts, seen: Observation) -> str:
    """Return what the phase with most time did: how much of the ceiling it read, and how much of that were experts."""
    phase = max(seen.phases, key=lambda one: one.steps * one.busy_s)
    ceiling = facts.machine.rank_ceilings(parse_topology(facts.topology).num_ranks).memory_bandwidth
    if seen.is_cached:
        return f"{phase.phase} steps take {1e3 * phase.busy_s:.1f} ms with weights in the cache"
    share = phase.bytes_read / (phase.busy_s * ceiling) if phase.busy_s > 0 else 0.0
    routed = phase.routed_bytes / phase.bytes_read if phase.bytes_read > 0 else 0.0
    return f"{phase.phase} reads {share:.0%} of the ceiling, {routed:.0%} of it routed weights"


def change(facts: Facts, seen: Observation, found: Candidate, ranking: Ranking) -> str:
    """Return why to change to `found`, and what that takes."""
    name = parse_topology(found.topology).short()
    text = f"{what_ran(facts, seen)}; {name} {_difference(facts, found, ranking.here)}"
    text += f": {1 + found.gain:.2f} times the tokens/s"
    if not found.is_measured:
        text += ", as far as a link that nobody measured is as assumed"
    return f"{text}; {_cost(found)}"


def exchange_bound(facts: Facts, seen: Observation, wider: Candidate, ranking: Ranking) -> str:
    """Return why the wider layout `wider` does not help."""
    name = parse_topology(wider.topology).short()
    return (
        f"{what_ran(facts, seen)}; wider would not help: bound by exchange, {name} "
        f"{_difference(facts, wider, ranking.here)}, {1 + wider.gain:.2f} times the tokens/s"
    )


def stay(facts: Facts, seen: Observation, ranking: Ranking) -> str:
    """Return that no layout is worth a change, and what the best other one would bring."""
    others = [one for one in ranking.candidates if one is not ranking.here]
    if not others:
        return f"{what_ran(facts, seen)}; nothing to gain: no other layout holds this load"
    best = parse_topology(others[0].topology).short()
    rest = f"{best}, the best other layout, is expected to reach {1 + others[0].gain:.2f} times the tokens/s"
    return f"{what_ran(facts, seen)}; nothing to gain: {rest}"


def _cost(found: Candidate) -> str:
    """Return what a change takes."""
    if found.way == BESIDE:
        return f"the change takes about {found.change_s:.0f} s beside what runs"
    if found.way == IN_TURNS:
        return f"the change takes about {found.change_s:.0f} s in turns, and {found.lost_s:.0f} s of tokens"
    return f"the change needs a restart of about {found.change_s:.0f} s, as nobody would serve meanwhile"


def _difference(facts: Facts, found: Candidate, here: Candidate) -> str:
    """Return what a layout does otherwise than the one that runs.

    Ranks of a host share its memory: where their number changes, what all of them read decides.
    """
    said = []
    ranks = parse_topology(found.topology).num_ranks / parse_topology(here.topology).num_ranks
    of_all = facts.machine.is_shared and ranks != 1
    ratio = found.routed_ratio * ranks if of_all else found.routed_ratio
    if ratio < 0.98 or ratio > 1.02:
        low, high = _HALF
        if low < ratio < high:
            said.append(f"halves routed bytes {'of all ranks' if of_all else 'a rank'}")
        else:
            said.append(f"reads {ratio:.2f} times the routed bytes{' with all ranks' * of_all}")
    if found.between_share > here.between_share + 0.005:
        said.append(f"adds {found.between_share - here.between_share:.0%} of a step between domains")
    elif abs(found.exchange_share - here.exchange_share) >= 0.005:
        said.append(f"spends {found.exchange_share:.0%} of a step in exchanges, not {here.exchange_share:.0%}")
    return " and ".join(said) or "reads and sends much the same"
