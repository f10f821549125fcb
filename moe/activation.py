"""What stands between the two products of a gated FFN.

Not its computation (experts.py, native_experts.py). No torch: configs of models hold it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Activation:
    """What stands between the two products of a gated FFN.

    Attributes:
        kind: `silu`: silu(gate) * up. `clamped`: gate is cut above `limit`, up to [-limit, limit], and the result is
            gate * sigmoid(alpha * gate) * (up + 1) (gpt-oss).
        alpha, limit: of `clamped`.
    """

    kind: str = "silu"
    alpha: float = 1.702
    limit: float = 7.0


SILU = Activation()
