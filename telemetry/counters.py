"""Counters that anyone may increment: bytes and tokens of one rank, by phase and component.

Not an exporter and not a model of the hardware: numbers go in here and are read elsewhere.
Units: bytes, seconds, tokens. Arrays: `bytes_moved` [phase, component] i64, `expert_tokens` and of it
`expert_decode_tokens` [L_moe, P_local] i64, `exchange_bytes` i64 and `exchange_seconds` f64 [scope].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

PHASES = ("prefill", "decode", "mixed", "idle")
COMPONENTS = ("attention", "routed", "shared", "dense", "kv", "activations", "exchange")
SCOPES = ("rank", "domain", "between")  # how far rows go: within the rank, within its domain, between domains
_PHASE = {name: i for i, name in enumerate(PHASES)}
_DECODE = _PHASE["decode"]
_COMPONENT = {name: i for i, name in enumerate(COMPONENTS)}


@dataclass
class RankCounters:
    """All counters of one rank; every value only grows. One thread writes, any thread may read.

    `dense` means every other weight that a step reads: embedding rows, norms, dense FFN, router, head.
    """

    num_moe_layers: int
    num_local_slots: int
    bytes_moved: np.ndarray = field(default_factory=lambda: np.zeros((len(PHASES), len(COMPONENTS)), np.int64))
    busy_seconds: np.ndarray = field(default_factory=lambda: np.zeros(len(PHASES), np.float64))
    steps: np.ndarray = field(default_factory=lambda: np.zeros(len(PHASES), np.int64))
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(len(PHASES), np.int64))
    exchange_bytes: np.ndarray = field(default_factory=lambda: np.zeros(len(SCOPES), np.int64))
    exchange_seconds: np.ndarray = field(default_factory=lambda: np.zeros(len(SCOPES), np.float64))
    expert_tokens: np.ndarray = field(init=False)
    expert_decode_tokens: np.ndarray = field(init=False)  # those of steps of phase decode
    unowned_ids: int = 0
    phase: int = _PHASE["idle"]

    def __post_init__(self) -> None:
        self.expert_tokens = np.zeros((self.num_moe_layers, self.num_local_slots), np.int64)
        self.expert_decode_tokens = np.zeros_like(self.expert_tokens)
        self._bytes = self.bytes_moved.reshape(-1).data  # faster than numpy for single numbers

    def begin_step(self, phase: str, num_tokens: int) -> None:
        """Start a step of `phase` with `num_tokens` rows on this rank (0 for a rank that only keeps step)."""
        self.phase = _PHASE[phase]
        self.steps[self.phase] += 1
        self.tokens[self.phase] += num_tokens

    def add_bytes(self, component: str, num_bytes: int) -> None:
        """Count `num_bytes` read from or written to memory (for `exchange`: put on the link) by `component`."""
        self._bytes[self.phase * len(COMPONENTS) + _COMPONENT[component]] += num_bytes

    def add_exchange(self, num_bytes: Sequence[int], seconds: Sequence[float]) -> None:
        """Count what an exchange moved and how long it took, an entry a scope; what left the rank was on a link."""
        self.exchange_bytes += num_bytes
        self.exchange_seconds += seconds
        self.add_bytes("exchange", sum(num_bytes[1:]))

    def add_expert_tokens(self, tokens_per_slot: np.ndarray) -> None:
        """Count rows that reached each local slot of every MoE layer in one pass: [L_moe, P_local] i64."""
        self.expert_tokens += tokens_per_slot
        if self.phase == _DECODE:
            self.expert_decode_tokens += tokens_per_slot

    def end_step(self, busy_seconds: float) -> None:
        """Close the step that `begin_step` opened; `busy_seconds` is its time from first to last operation."""
        self.busy_seconds[self.phase] += busy_seconds
