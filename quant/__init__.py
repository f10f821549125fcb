"""Number formats for weights and KV (level 1)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .formats import FORMATS, KV_FORMATS, SCALE_FORMAT, NumberFormat, parse_format, parse_kv_format
    from .linear import Matrix, dense, embedding_rows, head_linear, logits, num_bytes
    from .memory import empty_matrix
    from .packed import PackedTensor, can_pack, pack
    from .quantization import Quantization
    from .scheme import FP8_BLOCK, INT4_GROUP, INT8_BLOCK, MXFP4, MXFP4_SCHEME, QuantScheme
    from .schemes import WeightScheme, down_scheme, head_scheme, weight_scheme
    from .tensor import QuantTensor
    from .tiles import packed_bytes

# Where each name lives, but for those that a file is called after. Most bring torch along, which takes seconds, and
# whoever only plans needs none of these.
_HOMES = {
    "FORMATS": ".formats",
    "KV_FORMATS": ".formats",
    "NumberFormat": ".formats",
    "SCALE_FORMAT": ".formats",
    "parse_format": ".formats",
    "parse_kv_format": ".formats",
    "Matrix": ".linear",
    "dense": ".linear",
    "embedding_rows": ".linear",
    "head_linear": ".linear",
    "logits": ".linear",
    "num_bytes": ".linear",
    "empty_matrix": ".memory",
    "PackedTensor": ".packed",
    "can_pack": ".packed",
    "pack": ".packed",
    "Quantization": ".quantization",
    "FP8_BLOCK": ".scheme",
    "INT4_GROUP": ".scheme",
    "INT8_BLOCK": ".scheme",
    "MXFP4": ".scheme",
    "MXFP4_SCHEME": ".scheme",
    "QuantScheme": ".scheme",
    "WeightScheme": ".schemes",
    "down_scheme": ".schemes",
    "head_scheme": ".schemes",
    "weight_scheme": ".schemes",
    "QuantTensor": ".tensor",
    "packed_bytes": ".tiles",
}

__all__ = [
    "FORMATS",
    "FP8_BLOCK",
    "INT4_GROUP",
    "INT8_BLOCK",
    "KV_FORMATS",
    "MXFP4",
    "MXFP4_SCHEME",
    "SCALE_FORMAT",
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
    "logits",
    "num_bytes",
    "pack",
    "packed_bytes",
    "parse_format",
    "parse_kv_format",
    "weight_scheme",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
