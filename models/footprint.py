"""What a model weighs, worked out from its config alone: the record for planner and byte budget, and its cache groups.

Not a measurement: `tests/models/test_footprint.py` holds it against tensors that were really loaded.
Units: bytes of the number format that weights are held in (parameters that a family keeps in fp32 count as fp32).
"""

from __future__ import annotations

import math

from ..kvcache.groups import CacheGroup
from ..quant import FORMATS, NumberFormat, parse_format
from ..topologies.footprint import ModelFootprint
from .config import ModelConfig
from .name_map import Shapes, attention_shapes, dense_shapes, expert_shapes, keeps_fp32, router_shapes, shared_shapes


def model_footprint(config: ModelConfig, *, name: str, dtype: NumberFormat | str) -> ModelFootprint:
    """Return what the model weighs when its weights are held as `dtype`; `name` is what a printed budget calls it."""
    held, moe, dim = _as_format(dtype), config.moe, config.hidden_size

    def size(shapes: Shapes) -> int:
        return sum(
            math.prod(shape) * (FORMATS["float32"] if keeps_fp32(config, f".{parameter}") else held).itemsize
            for parameter, shape in shapes.items()
        )

    num_moe, num_dense = len(config.moe_layers), config.num_layers - len(config.moe_layers)
    norm: Shapes = {"norm.weight": (dim,)}
    matrix: Shapes = {"weight": (config.vocab_size, dim)}
    dense, routers, shared, expert = dense_shapes(config) if num_dense else {}, {}, {}, {}
    if moe is not None:
        routers, shared, expert = router_shapes(config, moe), shared_shapes(config, moe), expert_shapes(config, moe, 0)
    top_k = moe.routing.top_k if moe else 0
    attention = attention_shapes(config)
    touched = (
        config.num_layers * _matrix_elements(attention)
        + num_dense * _matrix_elements(dense)
        + num_moe * (_matrix_elements(routers) + _matrix_elements(shared) + top_k * _matrix_elements(expert))
        + _matrix_elements(matrix)
    )
    return ModelFootprint(
        name=name,
        num_layers=config.num_layers,
        num_moe_layers=num_moe,
        num_experts=moe.routing.num_experts if moe else 0,
        top_k=top_k,
        attention_bytes=config.num_layers * size(attention),
        dense_bytes=num_dense * size(dense) + num_moe * size(routers) + (config.num_layers + 1) * size(norm),
        shared_bytes=num_moe * size(shared),
        expert_bytes=size(expert),
        embedding_bytes=size(matrix),
        head_bytes=0 if config.head_tied else size(matrix),
        kv_bytes_per_token=sum(group.bytes_per_token() for group in cache_groups(config, dtype=held)),
        hidden_size=dim,
        vocab_size=config.vocab_size,
        max_model_len=config.max_position_embeddings,
        activation_itemsize=held.itemsize,
        flops_per_token=2 * touched,
    )


def cache_groups(config: ModelConfig, *, dtype: NumberFormat | str) -> tuple[CacheGroup, ...]:
    """Return the cache groups of the model when KV is stored as `dtype`: one, for all layers attend to all tokens."""
    group = CacheGroup(
        name="full",
        kind="full",
        layers=tuple(range(config.num_layers)),
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        value_dim=config.head_dim,
        number_format=_as_format(dtype),
    )
    return (group,)


def _as_format(dtype: NumberFormat | str) -> NumberFormat:
    return parse_format(dtype) if isinstance(dtype, str) else dtype


def _matrix_elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values() if len(shape) == 2)
