"""The `quantization_config` of a config.json, as far as moewe reads quantised checkpoints.

Not the formats (`quant`) and not the matrices: this only says how the files are stored, or refuses them by name.
Units: elements of a stored matrix.
"""

from __future__ import annotations

from ..quant import FP8_BLOCK, MXFP4_SCHEME, Quantization, QuantScheme
from .family import Family
from .json_fields import Fields, show

MAX_BLOCK, MAX_MODULES = 1 << 16, 1 << 17
# What may stand beside quant_method: for each field its only values, None where any value may stand.
_FIELDS: dict[str, dict[str, tuple[object, ...] | None]] = {
    "mxfp4": {"modules_to_not_convert": None, "dequantize": None},
    "fp8": {
        "weight_block_size": None,
        "modules_to_not_convert": None,
        "ignored_layers": None,
        "dequantize": None,
        # Weights are dequantised before products, so how activations would have been quantised does not matter.
        "activation_scheme": ("dynamic",),
        "fmt": ("e4m3", "float8_e4m3fn"),
        "scale_fmt": ("float", "ue8m0"),
        "expert_dtype": ("fp8",),
        "modules_to_convert": (),
    },
}


def parse_quantization(fields: Fields, family: Family) -> Quantization | None:
    """Return how quantised matrices are stored; None where there are none."""
    if fields.raw("quantization_config") is None:
        return None
    section = fields.section("quantization_config")
    method = section.raw("quant_method")
    if not isinstance(method, str) or method not in family.quantization:
        known = ", ".join(family.quantization) or "none"
        why = f"is a quantisation that moewe does not load for this family (it loads: {known}); use the bf16 weights"
        raise section.refuse("quant_method", method, why)
    allowed = _FIELDS[method]
    for name, value in section.content.items():
        if name == "quant_method" or value is None:
            continue
        if name not in allowed:
            raise section.refuse(name, value, f"is not a field of {method} that moewe knows; use the bf16 weights")
        values = allowed[name]
        if values is not None and value not in values:
            may = ", ".join(map(show, values)) or "nothing"
            raise section.refuse(name, value, f"is not supported ({may} is); use the bf16 weights")
    scheme = MXFP4_SCHEME
    if method == "fp8":
        sizes = section.integers("weight_block_size", 1, MAX_BLOCK, max_length=2)
        if len(sizes) != 2:
            value = section.raw("weight_block_size")
            raise section.refuse("weight_block_size", value, "must hold the rows and columns of a block, as [128, 128]")
        scheme = QuantScheme(kind=FP8_BLOCK, block=(sizes[0], sizes[1]))
    return Quantization(scheme=scheme, excluded=_modules(section))


def _modules(section: Fields) -> tuple[str, ...]:
    name = "modules_to_not_convert|ignored_layers"
    value = section.raw(name)
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_MODULES or not all(isinstance(v, str) and v for v in value):
        raise section.refuse(name, value, "must be a list of names of modules")
    return tuple(value)
