"""Number formats for weights and KV (level 1)."""

from .formats import FORMATS, KV_FORMATS, SCALE_DTYPE, NumberFormat, parse_format, parse_kv_format
from .linear import Matrix, dense, embedding_rows, head_linear, linear, logits, num_bytes
from .memory import empty_matrix
from .pack_codes import pack_codes
from .packed import PackedTensor, can_pack, pack, packed_bytes
from .quantization import Quantization
from .quantize import quantize
from .schemes import WeightScheme, down_scheme, head_scheme, weight_scheme
from .tensor import FP8_BLOCK, INT4_GROUP, INT8_BLOCK, MXFP4, MXFP4_SCHEME, QuantScheme, QuantTensor

__all__ = [
    "FORMATS",
    "FP8_BLOCK",
    "INT4_GROUP",
    "INT8_BLOCK",
    "KV_FORMATS",
    "MXFP4",
    "MXFP4_SCHEME",
    "SCALE_DTYPE",
    "Matrix",
    "NumberFormat",
    "PackedTensor",
    "QuantScheme",
    "QuantTensor",
    "Quantization",
    "WeightScheme",
    "can_pack",
    "dense",
    "down_scheme",
    "embedding_rows",
    "empty_matrix",
    "head_linear",
    "head_scheme",
    "linear",
    "logits",
    "num_bytes",
    "pack",
    "pack_codes",
    "packed_bytes",
    "parse_format",
    "parse_kv_format",
    "quantize",
    "weight_scheme",
]
