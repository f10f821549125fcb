"""What the advisor is told and what it says: plain records that go into an audit log and come out of it again.

Not a measurement and not a judgement. Whatever comes from a file is checked: numbers are finite and not negative.
Units: seconds, bytes, FLOP/s; `_s` of one step and rank unless said otherwise; shares from 0 to 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from ..cost import ExpertSpeed
from ..footprint import ModelFootprint
from ..kv_sizes import StepLimits
from ..machine import Machine
from ..spec import parse_topology

OBSERVING, IDLE, CHANGE, STAY, EXCHANGE_BOUND = VERDICTS = ("observing", "idle", "change", "stay", "exchange_bound")
_MOST_EXPERTS, _MOST_DEVICES = 4096, 4096


class AdviceError(ValueError):
    """A record that cannot be right; one line with field, value and fix."""


def check_numbers(record: object, names: Sequence[str]) -> None:
    """Refuse a number that is negative or none.

    Raises:
        AdviceError: names the field and the value.
    """
    for name in names:
        value = getattr(record, name)
        if not (math.isfinite(value) and value >= 0):
            raise AdviceError(f"{name}={value!r} is not allowed; use a number of at least 0")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What stays as it is while a server lives.

    Attributes:
        topology: the layout that runs, in its long form.
        footprint, limits: of the model, a step and a sequence.
        machine: with ceilings of one device (of a host that ranks share: of all of it) and links as measured.
        experts: how fast experts really run on a rank of this layout; None where nobody measured.
        start_s: from the start of this layout until it was ready.
        kv_bytes: KV of a rank that was asked for; None takes what is left.
        most_kv_bytes: of that, what all ranks together take at most, but for one sequence a rank; None bounds nothing.
        weight_bytes: that all ranks together hold.
    """

    topology: str
    footprint: ModelFootprint
    limits: StepLimits
    machine: Machine
    experts: ExpertSpeed | None = None
    start_s: float = 0.0
    kv_bytes: int | None = None
    most_kv_bytes: int | None = None
    weight_bytes: int = 0

    def __post_init__(self) -> None:
        check_numbers(self, ("start_s", "weight_bytes"))
        num_ranks = max(self.machine.num_devices, parse_topology(self.topology).num_ranks)
        if num_ranks > _MOST_DEVICES:
            raise AdviceError(f"num_devices={num_ranks} is not allowed; use at most {_MOST_DEVICES}")


@dataclass(frozen=True, kw_only=True)
class PhaseSeen:
    """Steps of one phase in a window.

    Attributes:
        phase: `decode`, `mixed` or `prefill`.
        steps: of a replica, the mean.
        rows: of a step, over all replicas.
        busy_s: of a step of a rank, with waiting for its plan.
        host_s: of that, the host's part and that waiting.
        routed_bytes, weight_bytes, kv_bytes: that a rank read in a step: experts, other weights, KV.
        flops: of a rank in a step, of which `routed_flops` in experts.
    """

    phase: str
    steps: float
    rows: float
    busy_s: float
    host_s: float
    routed_bytes: float
    weight_bytes: float
    kv_bytes: float
    flops: float
    routed_flops: float

    def __post_init__(self) -> None:
        check_numbers(self, [each.name for each in fields(self) if each.name != "phase"])

    @property
    def bytes_read(self) -> float:
        """All that a rank read in a step."""
        return self.routed_bytes + self.weight_bytes + self.kv_bytes


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What a server did in a window.

    Attributes:
        time: when it ended, Unix seconds.
        seconds: how long it was.
        phases: what ran; empty where nothing did.
        link_s: of all steps together, what even the rank that waits least spent in collectives.
        wait_s: what the others spent there beyond that, the mean over ranks.
        running: requests at once, the mean.
        context: tokens in KV of each.
        popularity: the part of all choices that each expert of a layer gets [E], largest first, the mean over layers.
        imbalances: (ranks of a group, rows of the fullest over the mean where experts stand in order).
        shares: of what binds, by the words of the verdict; empty where there is none.
        bound: the word of the largest.
        is_cached: weights lie in a cache, so that bytes say nothing.
    """

    time: float
    seconds: float
    phases: tuple[PhaseSeen, ...] = ()
    link_s: float = 0.0
    wait_s: float = 0.0
    running: float = 0.0
    context: float = 0.0
    popularity: tuple[float, ...] = ()
    imbalances: tuple[tuple[int, float], ...] = ()
    shares: dict[str, float]
    bound: str = "idle"
    is_cached: bool = False

    def __post_init__(self) -> None:
        check_numbers(self, ("time", "seconds", "link_s", "wait_s", "running", "context"))
        if len(self.popularity) > _MOST_EXPERTS or len(self.imbalances) > _MOST_EXPERTS:
            raise AdviceError(f"popularity of {len(self.popularity)} experts is not allowed; at most {_MOST_EXPERTS}")
        if not all(math.isfinite(part) and part >= 0 for part in self.popularity):
            raise AdviceError("popularity holds what is no part of choices; use numbers of at least 0")
        if not all(ranks >= 1 and 1 <= over <= ranks for ranks, over in self.imbalances):
            raise AdviceError("imbalances hold what cannot be; the fullest of N ranks has 1 to N times the mean")

    @property
    def num_steps(self) -> float:
        """Steps of a replica."""
        return sum(phase.steps for phase in self.phases)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout and what is expected of it.

    Attributes:
        topology: in its long form.
        step_s: of a step of the window's mix, calibrated.
        gain: tokens/s over those of the layout that runs, less 1.
        exchange_share, between_share: parts of a step in exchanges, and in those between domains.
        routed_ratio: routed bytes that a rank reads, over those that it reads now; 1 where none are read.
        products_s: of that step, reading weights and multiplying.
        restart_s: until a replica of it is ready.
        load_bytes: that all ranks together load.
        way: how it can take the place of what runs, one of `turns.WAYS`; empty for the layout that runs.
        change_s: that takes so long, without waiting for requests to end.
        lost_s: of the tokens/s that there are now, so many seconds' are not generated meanwhile.
        sequences: of the observed length that KV holds at once.
        is_measured: links were measured, or nothing travels.
    """

    topology: str
    step_s: float
    gain: float
    exchange_share: float
    between_share: float
    routed_ratio: float
    products_s: float
    restart_s: float
    load_bytes: int
    sequences: int
    is_measured: bool
    way: str = ""
    change_s: float = 0.0
    lost_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How what was observed scales the model.

    Attributes:
        observed_s: of a step of the window's mix.
        predicted_s: of the same by figures measured at the start alone.
        products: what reading and multiplying takes, over what the model says.
        rest_s: of a step, what it does not explain: launches and small operations.
        exchange: exchanges over what was measured at the start.
        wait: waiting for fuller ranks over what popularity explains.
        meet_s: of a step, what collectives take beyond both: ranks that come late for other reasons. It is spent
            wherever ranks meet, and nowhere else.
    """

    observed_s: float
    predicted_s: float
    products: float
    rest_s: float
    exchange: float
    wait: float
    meet_s: float

    @property
    def error(self) -> float:
        """The model without calibration over what was observed, less 1."""
        return self.predicted_s / self.observed_s - 1 if self.observed_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What the advisor says at the end of a window.

    Attributes:
        number: of the window, from 1.
        time: of the observation.
        topology: the layout that runs.
        verdict: one of VERDICTS.
        advised: the layout to change to with `change`, else the one that runs.
        gain: expected of it; with other verdicts of the best candidate.
        reason: one sentence with figures.
        candidates: by expected tokens/s, best first, the layout that runs among them.
        calibration: None where nothing ran.
        excluded: layouts that are out, with the reason.
    """

    number: int
    time: float
    topology: str
    verdict: str
    advised: str
    gain: float
    reason: str
    candidates: tuple[Candidate, ...] = ()
    calibration: Calibration | None = None
    excluded: tuple[tuple[str, str], ...] = ()
