"""What vLLM's published formula books for the FFNs of a rank's step: `vllm/v1/metrics/perf.py` of pull request 30738.

Not ours, and not run from vLLM: the formula as it reads, with its names. It sees a step's tokens of one data-parallel
engine and the config, never what routers chose. Units: bytes; operations.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FfnEstimate:
    """The config as the formula sees it.

    Attributes:
        D, MI: hidden size, width of a routed expert.
        E, Ek: experts, and how many a token chooses.
        S: shared experts, taken to be as wide as routed ones; 0 where the config has no `n_shared_experts`.
        Lm: MoE layers.
        DP, TP: ranks of data and tensor parallelism; EP = DP * TP.
        b: bytes of a weight, by the name of its format: scales are none.
    """

    D: int
    MI: int
    E: int
    Ek: int
    S: int
    Lm: int
    DP: int
    TP: int
    b: float

    def activated_experts(self, T: int) -> int:
        """Experts of a layer that a rank is said to read. vLLM: "Assume perfect load balancing for now"."""
        act_tokens = T * self.Ek // (self.DP * self.TP)
        return min(act_tokens, self.E // (self.DP * self.TP))

    def routed_read_bytes(self, T: int) -> float:
        """Bytes of routed experts that a rank is said to read in a step of T tokens."""
        return 3 * self.D * self.MI * self.activated_experts(T) * self.b * self.Lm

    def shared_read_bytes(self) -> float:
        """The same of shared experts."""
        return 3 * self.D * self.MI * self.S * self.b * self.Lm

    def flops(self, T: int) -> int:
        """Operations of routed and shared experts that a rank is said to run."""
        routed = 2 * self.D * 3 * self.MI * (T * self.Ek // (self.DP * self.TP)) * self.Lm
        return routed + 2 * self.D * 3 * self.MI * self.S * T * self.Lm
