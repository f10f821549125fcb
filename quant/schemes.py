"""The formats that `--quantization` knows: how weights of a bf16 checkpoint are held when they are quantised at load.

Not a quantiser (quantize.py) and not the formats of quantised checkpoints (tensor.py).
Units: bytes as held by native kernels, padding included.
"""

from __future__ import annotations

from dataclasses import dataclass

from .tiles import INT4, INT8, column_tiles

SCHEMES = (INT8, INT4)
GROUPS = (32, 64, 128)
MOST_INPUTS = 1 << 17  # the sum of so many products of two bytes fits into 32 bits


@dataclass(frozen=True, kw_only=True)
class WeightScheme:
    """A format of quantised matrices.

    Attributes:
        kind: `int8`: whole numbers, a scale for each output, f32; `int4`: of those, sixteen for each group of inputs
            and output, evenly spaced: where they begin and their step, a byte each.
        group: of int4, inputs that share sixteen numbers, one of GROUPS; 0 for int8.
    """

    kind: str
    group: int = 0

    def num_bytes(self, rows: int, columns: int, *, gate_up: bool = False) -> int:
        """Return what a matrix takes, padding and scales included.

        Example:
            >>> WeightScheme(kind="int8").num_bytes(16, 64)
            1088
        """
        outputs, inputs = 16 * column_tiles(rows, gate_up=gate_up), -(-columns // 64) * 64
        if self.kind == INT8:
            return outputs * (inputs + 4)
        return outputs * (inputs // 2 + -(-inputs // self.group) * 2 + 4)


def weight_scheme(name: str, *, group: int = GROUPS[0]) -> WeightScheme:
    """Return the scheme called `name`.

    Raises:
        ValueError: there is none of that name, or int4 has no groups of that size.
    """
    if name == INT8:
        return WeightScheme(kind=INT8)
    if name != INT4:
        raise ValueError(f"quantization={name!r} is not a format that moewe quantises to; use one of: int8, int4")
    if group not in GROUPS:
        raise ValueError(f"int4 has groups of {', '.join(map(str, GROUPS))}, not of {group}")
    return WeightScheme(kind=INT4, group=group)


def head_scheme() -> WeightScheme:
    """Return how the output head is held under every scheme: it decides between tokens, so four bits are too few."""
    return WeightScheme(kind=INT8)


def down_scheme(scheme: WeightScheme) -> WeightScheme:
    """Return how down projections of FFNs that every token passes (dense, shared) are held under `scheme`.

    In int8: what they lose is in the residual stream of every token, and beside routed experts they are few.
    """
    return WeightScheme(kind=INT8) if scheme.kind == INT4 else scheme
