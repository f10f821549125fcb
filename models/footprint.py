"""What a model weighs, worked out from its config alone: the record for planner and byte budget, and its cache groups.

Not a measurement: `tests/models/test_footprint.py` holds it against tensors that were really loaded.
Units: bytes of the number format that weights are held in; what a family keeps in fp32 counts as fp32, and quantised
matrices count as stored. Those that are quantised at load, and what is packed beside them, count with their padding,
fused ones part by part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..attention.tensor_parallel import HeadShare
from ..kvcache.groups import CacheGroup
from ..quant import NumberFormat, WeightScheme, down_scheme, head_scheme, packed_bytes, parse_format
from ..topologies.footprint import ModelFootprint
from ..topologies.kv_sizes import KVGroup
from .config import ConfigError, ModelConfig
from .head_shares import local_config, possible_shares
from .parameters import (
    EMBEDDING,
    HEAD,
    HEAD_BIAS,
    Parameter,
    Parameters,
    attention_parameters,
    dense_parameters,
    expert_parameters,
    ffn_norm_parameters,
    global_parameters,
    is_down_of_all,
    is_quantized_at_load,
    packed_by_head,
    router_parameters,
    shared_parameters,
)


def model_footprint(
    config: ModelConfig,
    *,
    name: str,
    dtype: NumberFormat | str,
    scheme: WeightScheme | None = None,
    kv_dtype: NumberFormat | None = None,
    foreign: Callable[[str, Parameter], int | None] | None = None,
) -> ModelFootprint:
    """Return what the model weighs when its weights are held as `dtype`, and its matrices quantised to `scheme`.

    `name` is what a printed budget calls it. KV is stored as `kv_dtype`, or else as the weights are. `foreign` gives
    the bytes of parameters that are held in a format of others, by name inside a layer, and None for the rest.
    """
    held, moe = _as_format(dtype), config.moe

    def size_of(name: str, parameter: Parameter) -> int:
        if foreign is not None and (num_bytes := foreign(name, parameter)) is not None:
            return num_bytes
        if scheme is not None and is_quantized_at_load(name):
            return (down_scheme(scheme) if is_down_of_all(name) else scheme).num_bytes(*parameter.shape)
        by_head = packed_by_head(name, parameter.shape)
        if scheme is not None and by_head is not None:
            return packed_bytes(*by_head)
        return parameter.num_bytes(held.itemsize)

    def size(parameters: Parameters) -> int:
        return sum(size_of(name, parameter) for name, parameter in parameters.items())

    whole = global_parameters(config)
    embedding = {EMBEDDING: whole.pop(EMBEDDING)}
    head = {name: whole.pop(name) for name in (HEAD, HEAD_BIAS) if name in whole}
    head_copy = 0  # one that is quantised is none of the embedding's memory
    if scheme is not None:
        head.pop(HEAD, None)
        head_copy = head_scheme().num_bytes(config.vocab_size, config.hidden_size)
    # Layer by layer, and none is kept: whoever wrote the config says how many there are.
    attention_bytes, dense_bytes, shared_bytes, expert_bytes = 0, size(whole), 0, 0
    touched, expert_numbers = config.vocab_size * config.hidden_size + matrix_numbers(whole), 0
    top_k = moe.routing.top_k if moe else 0
    for layer in range(config.num_layers):
        attention, dense = attention_parameters(config, layer), ffn_norm_parameters(config)
        shared, expert = Parameters(), Parameters()
        if moe is None or not config.is_moe(layer):
            dense |= dense_parameters(config, layer)
        else:
            dense |= router_parameters(config, moe)
            shared, expert = shared_parameters(config, moe, layer), expert_parameters(config, moe, layer)
        attention_bytes += size(attention)
        dense_bytes += size(dense)
        shared_bytes += size(shared)
        expert_bytes = max(expert_bytes, size(expert))
        expert_numbers = max(expert_numbers, matrix_numbers(expert))
        touched += sum(map(matrix_numbers, (attention, dense, shared))) + top_k * matrix_numbers(expert)
    return ModelFootprint(
        name=name,
        num_layers=config.num_layers,
        num_moe_layers=len(config.moe_layers),
        num_experts=moe.routing.num_experts if moe else 0,
        top_k=top_k,
        attention_bytes=attention_bytes,
        dense_bytes=dense_bytes,
        shared_bytes=shared_bytes,
        expert_bytes=expert_bytes,
        embedding_bytes=size(embedding),
        head_bytes=size(head) + head_copy,
        kv_groups=kv_groups(config, dtype=kv_dtype or held),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_model_len=config.max_position_embeddings,
        activation_itemsize=held.itemsize,
        flops_per_token=2 * touched,
        expert_flops=2 * expert_numbers,
        attention_shares=tuple(
            (atp, sum(size(each) for each in _attention(local_config(config, HeadShare(0, atp)))))
            for atp in possible_shares(config)
        ),
    )


def kv_groups(config: ModelConfig, *, dtype: NumberFormat | str) -> tuple[KVGroup, ...]:
    """Return of the cache groups what their sizes depend on."""
    return tuple(
        KVGroup(
            name=group.name,
            kind=group.kind,
            window=group.window,
            bytes_per_token=group.bytes_per_token(),
            num_heads=group.num_kv_heads,
        )
        for group in cache_groups(config, dtype=dtype)
    )


def cache_groups(config: ModelConfig, *, dtype: NumberFormat | str) -> tuple[CacheGroup, ...]:
    """Return the cache groups of the model when KV is stored as `dtype`, in the order of their first layers.

    Layers share a group when their tokens live equally long: all layers without window, all with the same one.
    """
    layers: dict[tuple[str, int], list[int]] = {}
    for layer in range(config.num_layers):
        layers.setdefault(_kind_and_window(config, layer), []).append(layer)
    latent = config.latent
    return tuple(
        CacheGroup(
            name=f"{kind}{window or ''}",
            kind=kind,
            layers=tuple(members),
            num_kv_heads=1 if latent else config.num_kv_heads,
            head_dim=latent.kv_rank + latent.rope_dim if latent else config.head_dim,
            value_dim=latent.kv_rank if latent else config.head_dim,
            number_format=_as_format(dtype),
            window=window,
        )
        for (kind, window), members in layers.items()
    )


def _attention(config: ModelConfig) -> Iterator[Parameters]:
    return (attention_parameters(config, layer) for layer in range(config.num_layers))


def _kind_and_window(config: ModelConfig, layer: int) -> tuple[str, int]:
    attention = config.attention_of(layer)
    if config.latent is not None:
        if attention.window or attention.chunk:
            raise ConfigError(f"layer {layer} has a window over latent KV, which is not supported; use a model without")
        return "latent", 0
    if attention.window and attention.chunk:
        raise ConfigError(f"layer {layer} has a window of {attention.window} and chunks of {attention.chunk}; use one")
    if attention.window:
        return "window", attention.window
    return ("chunk", attention.chunk) if attention.chunk else ("full", 0)


def _as_format(dtype: NumberFormat | str) -> NumberFormat:
    return parse_format(dtype) if isinstance(dtype, str) else dtype


def matrix_numbers(parameters: Parameters) -> int:
    """Return the numbers in matrices, which a token is multiplied with once each; scales are none."""
    return sum(
        parameter.num_elements * parameter.packed
        for name, parameter in parameters.items()
        if len(parameter.shape) >= 2 and not name.endswith("weight_scale")
    )
