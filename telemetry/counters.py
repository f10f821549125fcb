"""Counters that anyone may increment: bytes, operations, time and tokens of one rank, by phase and component.

Not an exporter and not a model of the hardware: numbers go in here and are read elsewhere. Counting is a handful of
additions a step, whatever E and L are: what weights weigh is added up once, when they are loaded. Whoever counts may
put additions off, too, until somebody asks: between two steps no code is in a cache, and many in a row cost what one
does.
Units: bytes, floating-point operations (a multiplication and an addition are two), seconds, tokens. Arrays:
`bytes_moved` i64 and `flops` f64 [phase, component], `expert_tokens` and of it `expert_decode_tokens` [L_moe, P_local]
i64, `exchange_bytes` i64 and `exchange_seconds` f64 [scope]; seconds of steps f64 [phase].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

PHASES = ("prefill", "decode", "mixed", "idle")
COMPONENTS = ("attention", "routed", "shared", "dense", "kv", "activations", "exchange")
SCOPES = ("rank", "domain", "between")  # how far rows go: within the rank, within its domain, between domains
_PHASE = {name: i for i, name in enumerate(PHASES)}
_DECODE = _PHASE["decode"]
_COMPONENT = {name: i for i, name in enumerate(COMPONENTS)}
_WRAP = (1 << 63) - 1  # bytes of some weeks at full speed: then the counter begins at 0 again, which readers know


@dataclass
class RankCounters:
    """All counters of one rank; every value only grows. One thread writes; it calls `settle` before values are read.

    `dense` means every other weight that a step reads: embedding rows, norms, dense FFN, router, head. As operations,
    `attention` are its projections and `kv` its scores and sums of values; only products count, not norms and the like.

    Attributes:
        busy_seconds: from the first to the last operation of steps, waiting for other ranks within them included.
        host_seconds: of that, before layers begin and after logits are there: plan, inputs, sampling, results.
        starved_seconds: outside of steps: waiting for a plan while this rank had sequences to run. The phase is that
            of the step which came. What is left of the clock, the rank had nothing to do.
    """

    num_moe_layers: int
    num_local_slots: int
    bytes_moved: np.ndarray = field(default_factory=lambda: np.zeros((len(PHASES), len(COMPONENTS)), np.int64))
    flops: np.ndarray = field(default_factory=lambda: np.zeros((len(PHASES), len(COMPONENTS)), np.float64))
    busy_seconds: np.ndarray = field(default_factory=lambda: np.zeros(len(PHASES), np.float64))
    host_seconds: np.ndarray = field(default_factory=lambda: np.zeros(len(PHASES), np.float64))
    starved_seconds: np.ndarray = field(default_factory=lambda: np.zeros(len(PHASES), np.float64))
    steps: np.ndarray = field(default_factory=lambda: np.zeros(len(PHASES), np.int64))
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(len(PHASES), np.int64))
    exchange_bytes: np.ndarray = field(default_factory=lambda: np.zeros(len(SCOPES), np.int64))
    exchange_seconds: np.ndarray = field(default_factory=lambda: np.zeros(len(SCOPES), np.float64))
    expert_tokens: np.ndarray = field(init=False)
    expert_decode_tokens: np.ndarray = field(init=False)  # those of steps of phase decode
    unowned_ids: int = 0
    waited_seconds: float = 0.0  # of `exchange_seconds`, those in which nothing travelled, where that is known
    measured_bytes: float = 0.0  # that a hardware counter of this rank's memory saw, all traffic; 0 without one
    joules: float = 0.0  # that this rank's GPU used; 0 without a counter
    phase: int = _PHASE["idle"]
    put_off: Callable[[], None] | None = None  # adds what somebody counted and has not added yet

    def __post_init__(self) -> None:
        self.expert_tokens = np.zeros((self.num_moe_layers, self.num_local_slots), np.int64)
        self.expert_decode_tokens = np.zeros_like(self.expert_tokens)
        self._bytes = self.bytes_moved.reshape(-1).data  # faster than numpy for single numbers
        self._flops: memoryview[float] = self.flops.reshape(-1).data  # type: ignore[assignment]

    def begin_step(self, phase: str, num_tokens: int) -> None:
        """Start a step of `phase` with `num_tokens` rows on this rank (0 for a rank that only keeps step)."""
        self.phase = _PHASE[phase]
        self.steps[self.phase] += 1
        self.tokens[self.phase] += num_tokens

    def settle(self) -> None:
        """Add what was put off."""
        if self.put_off is not None:
            self.put_off()

    def add_bytes(self, component: str, num_bytes: int) -> None:
        """Count `num_bytes` read from or written to memory (for `exchange`: put on the link) by `component`."""
        at = self.phase * len(COMPONENTS) + _COMPONENT[component]
        self._bytes[at] = (self._bytes[at] + num_bytes) & _WRAP

    def add_flops(self, component: str, num_flops: float) -> None:
        """Count operations of matrix products over rows that were really run."""
        self._flops[self.phase * len(COMPONENTS) + _COMPONENT[component]] += num_flops

    def add_exchange(self, num_bytes: Sequence[int], seconds: Sequence[float], waited_seconds: float = 0.0) -> None:
        """Count what an exchange moved and how long it took, an entry a scope; what left the rank was on a link."""
        self.waited_seconds += waited_seconds
        self.exchange_bytes += num_bytes
        self.exchange_seconds += seconds
        self.add_bytes("exchange", sum(num_bytes[1:]))

    def add_expert_tokens(self, tokens_per_slot: np.ndarray) -> None:
        """Count rows that reached each local slot of every MoE layer in one pass: [L_moe, P_local] i64."""
        self.expert_tokens += tokens_per_slot
        if self.phase == _DECODE:
            self.expert_decode_tokens += tokens_per_slot

    def end_step(self, busy_seconds: float, host_seconds: float = 0.0, starved_seconds: float = 0.0) -> None:
        """Close the step that `begin_step` opened; the attributes say what its times are."""
        self.busy_seconds[self.phase] += busy_seconds
        self.host_seconds[self.phase] += host_seconds
        self.starved_seconds[self.phase] += starved_seconds

    def clear(self) -> None:
        """Begin anew, at 0."""
        self.settle()
        for item in fields(self):
            if isinstance(values := getattr(self, item.name), np.ndarray):
                values[...] = 0
        self.unowned_ids, self.waited_seconds, self.measured_bytes, self.joules = 0, 0.0, 0.0, 0.0
