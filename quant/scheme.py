"""How packed data and scales of a quantised checkpoint make numbers: its schemes, and what they are stored as.

Not the data (tensor.py) and not the formats that moewe quantises to (schemes.py). No torch: whoever plans reads this.
"""

from __future__ import annotations

from dataclasses import dataclass

MXFP4, FP8_BLOCK, INT8_BLOCK, INT4_GROUP = "mxfp4", "fp8_block", "int8_block", "int4_group"
# Names of torch types.
DATA_TYPES = {MXFP4: "uint8", FP8_BLOCK: "float8_e4m3fn", INT8_BLOCK: "int8", INT4_GROUP: "uint8"}
SCALE_TYPES = {MXFP4: "uint8", FP8_BLOCK: "float32"}


@dataclass(frozen=True, kw_only=True)
class QuantScheme:
    """How data and scales make numbers.

    Attributes:
        kind: `mxfp4`: two e2m1 numbers a byte, low nibble first, times two to the power of an e8m0 scale; `fp8_block`,
            `int8_block`: e4m3 or whole numbers times an fp32 scale; `int4_group`: two codes (0 to 15) a byte, low
            nibble first, and (code - zero) times a scale.
        block: rows and columns that share a scale; the last block of either dim may be cut short. (1, 32) for mxfp4,
            (1, group) for int4_group; (1, all columns) has a scale an output, (all rows, all columns) one in all.
    """

    kind: str
    block: tuple[int, int]

    @property
    def is_two_a_byte(self) -> bool:
        """Whether a byte holds two numbers."""
        return self.kind in (MXFP4, INT4_GROUP)

    def data_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the shape of the packed data of a matrix."""
        return (rows, columns // 2) if self.is_two_a_byte else (rows, columns)

    def scales_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the shape of the scales of a matrix: one a block, begun blocks too."""
        return (-(-rows // self.block[0]), -(-columns // self.block[1]))


MXFP4_SCHEME = QuantScheme(kind=MXFP4, block=(1, 32))
