"""Which layers of a model are MoE and what each layer's attention sees, as the families spell it.

Not the table (`families`): rules that its entries point to, each from the fields and the number of layers.
Units: layer numbers; windows and chunks in tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from .config import LayerAttention
from .json_fields import Fields

MAX_LAYERS, MAX_WINDOW = 1024, 1 << 30
MoELayers = Callable[[Fields, int], tuple[int, ...]]
AttentionLayers = Callable[[Fields, int], tuple[LayerAttention, ...]]
# The fields, the layer and the window -> the layer has that window.
HasWindow = Callable[[Fields, int], bool]

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


# -- which layers are MoE --------------------------------------------------------------------------------------------


def every_layer(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """All layers are MoE."""
    return tuple(range(num_layers))


def sparse_step(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Layers i with (i + 1) % decoder_sparse_step == 0 that mlp_only_layers does not name."""
    step = fields.integer("decoder_sparse_step", 1, MAX_LAYERS, default=1)
    dense = fields.integers("mlp_only_layers", 0, MAX_LAYERS, max_length=MAX_LAYERS)
    return tuple(i for i in range(num_layers) if (i + 1) % step == 0 and i not in dense)


def after_first_dense(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """All layers but the first first_k_dense_replace are MoE."""
    return tuple(range(fields.integer("first_k_dense_replace", 0, num_layers), num_layers))


def listed_kinds(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Layers that mlp_layer_types calls sparse; without the list as `after_first_dense`."""
    kinds = _kinds(fields, "mlp_layer_types", num_layers, ("dense", "sparse"))
    if kinds is None:
        return after_first_dense(fields, num_layers)
    layers = tuple(i for i, kind in enumerate(kinds) if kind == "sparse")
    if "first_k_dense_replace" in fields.content and after_first_dense(fields, num_layers) != layers:
        value = fields.raw("first_k_dense_replace")
        raise fields.refuse("first_k_dense_replace", value, "contradicts mlp_layer_types; keep one of them")
    return layers


def interval_between(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Every moe_layer_interval-th layer from moe_layer_start_index to moe_layer_end_index (-1: the last)."""
    interval = fields.integer("moe_layer_interval", 1, MAX_LAYERS, default=1)
    start = fields.integer("moe_layer_start_index", 0, MAX_LAYERS, default=1)
    end = fields.integer("moe_layer_end_index", -1, MAX_LAYERS, default=-1)
    last = num_layers - 1 if end == -1 else end
    return tuple(i for i in range(num_layers) if (i + 1) % interval == 0 and start <= i <= last)


def listed_or_interleaved(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Layers that moe_layers names, or else every interleave_moe_layer_step-th."""
    if fields.raw("moe_layers") is not None:
        return tuple(sorted(set(fields.integers("moe_layers", 0, num_layers - 1, max_length=MAX_LAYERS))))
    step = fields.integer("interleave_moe_layer_step", 1, MAX_LAYERS, default=1)
    return tuple(range(step - 1, num_layers, step))


# -- what attention sees ---------------------------------------------------------------------------------------------


def all_layers(fields: Fields, layer: int) -> bool:
    """Every layer has the window."""
    return True


def even_layers(fields: Fields, layer: int) -> bool:
    """Layers 0, 2, 4, ... have the window."""
    return layer % 2 == 0


def from_max_window_layers(fields: Fields, layer: int) -> bool:
    """Layers from number max_window_layers on have the window."""
    return layer >= fields.integer("max_window_layers", 0, MAX_LAYERS)


def even_below_max_window_layers(fields: Fields, layer: int) -> bool:
    """Layers 0, 2, 4, ... below number max_window_layers have the window."""
    return layer % 2 == 0 and layer < fields.integer("max_window_layers", 0, MAX_LAYERS)


def full_attention(fields: Fields, num_layers: int) -> tuple[LayerAttention, ...]:
    """No layer has a window; a config that asks for one is refused."""
    window = fields.raw("sliding_window")
    if window is not None and fields.raw("use_sliding_window") is not False:
        raise fields.refuse("sliding_window", window, "asks for windows, which this family does not have; remove it")
    kinds = _kinds(fields, "layer_types", num_layers, (FULL, SLIDING, CHUNKED)) or ()
    if any(kind != FULL for kind in kinds):
        raise fields.refuse("layer_types", list(kinds), "may only hold full_attention in this family; correct it")
    return (LayerAttention(),) * num_layers


def windows(has_window: HasWindow, *, gated: bool = False, listed: bool = False) -> AttentionLayers:
    """Return the rule that gives the window of `sliding_window` to the layers for which `has_window` holds.

    Args:
        has_window: from the fields and a layer number.
        gated: only where use_sliding_window is true.
        listed: `layer_types` says which layers have the window, and `has_window` only where it is absent.
    """

    def rule(fields: Fields, num_layers: int) -> tuple[LayerAttention, ...]:
        window = 0
        asked = not gated or fields.flag("use_sliding_window", default=False)
        if asked and fields.stated("sliding_window") is not None:
            window = fields.integer("sliding_window", 1, MAX_WINDOW)
        kinds = _kinds(fields, "layer_types", num_layers, (FULL, SLIDING))
        derived = tuple(SLIDING if window and has_window(fields, i) else FULL for i in range(num_layers))
        if kinds is not None and not listed and kinds != derived:
            raise fields.refuse(
                "layer_types", list(kinds), "is not what this family does with its other fields; remove it"
            )
        kinds = kinds or derived
        if SLIDING in kinds and not window:
            hint = " and use_sliding_window to true" if gated else ""
            raise fields.refuse("layer_types", list(kinds), f"names windows: set sliding_window to their width{hint}")
        return tuple(LayerAttention(window=window if kind == SLIDING else 0) for kind in kinds)

    return rule


def chunks_with_rotary(fields: Fields, num_layers: int) -> tuple[LayerAttention, ...]:
    """Layers that no_rope_layers marks with 1 have rotary embedding and, unless layer_types says other, chunks."""
    marks = fields.integers("no_rope_layers", 0, 1, max_length=4 * MAX_LAYERS)
    if not marks:
        interval = fields.integer("no_rope_layer_interval", 1, MAX_LAYERS, default=4)
        marks = tuple(int((i + 1) % interval != 0) for i in range(num_layers))
    if len(marks) < num_layers:
        raise fields.refuse("no_rope_layers", list(marks), f"must hold a number for each of {num_layers} layers")
    chunk = 0
    if fields.stated("attention_chunk_size") is not None:
        chunk = fields.integer("attention_chunk_size", 1, MAX_WINDOW)
    kinds = _kinds(fields, "layer_types", num_layers, (FULL, CHUNKED))
    kinds = kinds or tuple(CHUNKED if marks[i] and chunk else FULL for i in range(num_layers))
    if CHUNKED in kinds and not chunk:
        raise fields.refuse("layer_types", list(kinds), "names chunks: set attention_chunk_size to their length")
    return tuple(
        LayerAttention(chunk=chunk if kind == CHUNKED else 0, rotary=bool(mark))
        for kind, mark in zip(kinds, marks[:num_layers], strict=True)
    )


def _kinds(fields: Fields, name: str, num_layers: int, known: tuple[str, ...]) -> tuple[str, ...] | None:
    value = fields.raw(name)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != num_layers:
        raise fields.refuse(name, value, f"must be a list of {num_layers} words, one a layer")
    unknown = next((kind for kind in value if kind not in known), None)
    if unknown is not None:
        raise fields.refuse(name, unknown, f"is not one of {', '.join(known)}; use another model")
    return tuple(value)
