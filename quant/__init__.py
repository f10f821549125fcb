"""Number formats for weights and KV (level 1)."""

from .formats import FORMATS, NumberFormat, parse_format
from .linear import dense, linear
from .quantization import Quantization
from .tensor import FP8_BLOCK, MXFP4, MXFP4_SCHEME, QuantScheme, QuantTensor

__all__ = [
    "FORMATS",
    "FP8_BLOCK",
    "MXFP4",
    "MXFP4_SCHEME",
    "NumberFormat",
    "QuantScheme",
    "QuantTensor",
    "Quantization",
    "dense",
    "linear",
    "parse_format",
]
