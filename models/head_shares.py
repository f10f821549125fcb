"""Attention whose heads are divided over the ranks of an attention replica: what of a model one of them holds.

Not a layout (topologies/spec.py) and not a collective (attention/tensor_parallel.py). A rank's share of the heads is a
`ModelConfig` of its own with fewer heads, from which its weights, its KV and its bytes follow as from any other; what
is new is where its part of each stored tensor begins. A rank has every `size`-th part of the query heads, side by side,
and of the KV heads those that they look at: a part of its own, or, where there are fewer than ranks, one with others.
Letters: H query heads, Hkv KV heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..attention.tensor_parallel import HeadShare
from ..topologies import Topology, TopologyError
from .config import ModelConfig
from .name_map import Piece
from .parameters import attention_parameters, layer_prefix, scheme_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Cut:
    """The part of a parameter that a rank holds: `count` entries from `start` on along `dim` of `shape`."""

    shape: tuple[int, ...]
    dim: int
    start: int
    count: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return that part of the parameter, a view."""
        return whole.narrow(self.dim, self.start, self.count)


def check_heads(config: ModelConfig, topology: Topology) -> None:
    """Refuse an attention layout that does not divide the heads.

    Raises:
        TopologyError: names the field, its value and a layout that would do.
    """
    problem = _problem(config, topology.atp)
    if problem is None:
        return
    atp = max(n for n in range(1, topology.atp) if topology.ep % n == 0 and _problem(config, n) is None)
    layout = f"{topology.short()}[adp={topology.ep // atp},atp={atp}]"
    raise TopologyError(f"atp={topology.atp} cannot run this model: {problem}; use {layout}")


def possible_shares(config: ModelConfig) -> tuple[int, ...]:
    """Return all numbers of ranks above one that can divide the heads, ascending."""
    return tuple(n for n in range(2, config.num_heads + 1) if _problem(config, n) is None)


def _problem(config: ModelConfig, atp: int) -> str | None:
    """Say why `atp` ranks cannot divide the heads; None where they can."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % atp:
        return f"num_attention_heads={heads} is not divisible by it"
    if config.latent is None and kv_heads % atp and atp % kv_heads:
        return f"num_key_value_heads={kv_heads} neither divides it nor is divisible by it"
    return _block_problem(config, atp)


def _block_problem(config: ModelConfig, atp: int) -> str | None:
    """Say which matrix has blocks with one scale that a share would cut."""
    if config.quantization is None or atp == 1:
        return None
    own = local_config(config, HeadShare(0, atp))
    for layer in range(config.num_layers):
        parameters = attention_parameters(own, layer)
        for name, cut in _layer_cuts(config, own, HeadShare(0, atp), layer).items():
            module, _, kind = name.rpartition(".")
            held = parameters[name]
            is_scaled = kind == "weight" and (f"{module}.weight_scale" in parameters or len(held.shape) == 3)
            scheme = scheme_of(config, layer, [module]) if is_scaled else None
            if scheme is None:
                continue
            if cut.dim == 0:  # latent keys and values of a head are stored and scaled as one matrix
                latent = config.latent if len(held.shape) == 3 else None
                size = cut.count * (latent.nope_dim + latent.value_dim if latent is not None else 1)
            else:
                size = cut.count
            if size % scheme.block[cut.dim]:
                side = ("rows", "columns")[cut.dim]
                return f"a share of {module} has {size} {side}, which blocks of {scheme.block[cut.dim]} do not divide"
    return None


def local_config(config: ModelConfig, share: HeadShare) -> ModelConfig:
    """Return the model as the rank of `share` holds it: with its heads alone.

    The bias of the output projection is added once, by the first.
    """
    if share.size == 1:
        return config
    return replace(
        config,
        num_heads=config.num_heads // share.size,
        num_kv_heads=max(1, config.num_kv_heads // share.size),
        output_bias=config.output_bias and share.is_first,
    )


def head_cuts(config: ModelConfig, share: HeadShare) -> dict[str, Cut]:
    """Return which part the rank of `share` holds of each parameter that it does not hold whole, by whole name."""
    if share.size == 1:
        return {}
    own = local_config(config, share)
    return {
        layer_prefix(layer) + name: cut
        for layer in range(config.num_layers)
        for name, cut in _layer_cuts(config, own, share, layer).items()
    }


def _layer_cuts(config: ModelConfig, own: ModelConfig, share: HeadShare, layer: int) -> dict[str, Cut]:
    """Return the cuts of one layer, by name inside of it: wherever fewer heads make a dim smaller."""
    cuts: dict[str, Cut] = {}
    whole = attention_parameters(config, layer)
    for name, held in attention_parameters(own, layer).items():
        shape = whole[name].shape
        for dim, (size, count) in enumerate(zip(shape, held.shape, strict=True)):
            if size != count:
                num_parts = size // count  # fewer than ranks where KV heads are shared
                cuts[name] = Cut(shape, dim, share.rank * num_parts // share.size * count, count)
    return cuts


def cut_pieces(pieces: Iterable[Piece], cuts: Mapping[str, Cut]) -> Iterator[Piece]:
    """Yield `pieces` with what a rank holds of their parameters, and no more of those that it holds in part."""
    for piece in pieces:
        if not any(part in cuts for part in piece.parts):
            yield piece
        elif piece.groups > 1:
            yield _fewer_heads(piece, cuts)
        else:
            yield from _parts(piece, cuts)


def _parts(piece: Piece, cuts: Mapping[str, Cut]) -> Iterator[Piece]:
    """Yield a piece for each part of `piece`, whose parts lie one below the other."""
    assert piece.is_plain, f"{piece.stored.name} is not stored as attention is"
    columns = math.prod(piece.shape[1:])
    position = piece.offset
    for name, rows in zip(piece.parts, piece.rows, strict=True):
        cut, start, count, width = cuts.get(name), 0, rows, columns
        if cut is not None and cut.dim == 0:
            inner = math.prod(cut.shape[1:-1])  # rows of an entry, where a parameter has three dims
            start, count = cut.start * inner * columns, cut.count * inner
        elif cut is not None:
            start, width = cut.start, cut.count
        yield replace(
            piece,
            offset=position + start,
            shape=(count, width) if len(piece.shape) > 1 else (count,),
            parts=(name,),
            rows=(count,),
            row_stride=columns if width != columns else 0,
        )
        position += rows * columns


def _fewer_heads(piece: Piece, cuts: Mapping[str, Cut]) -> Piece:
    """Return the run of heads of a rank, where the parts of each head lie together."""
    own = [cuts[part] for part in piece.parts]
    num_heads, first = own[0].count, own[0].start
    assert piece.groups == own[0].shape[0] and not piece.transposed, piece
    assert all((cut.dim, cut.start, cut.count) == (0, first, num_heads) for cut in own), own
    head_rows, columns = sum(piece.rows) // piece.groups, piece.shape[1]
    scales = piece.scales
    if scales is not None:
        stored, scheme = scales
        num_rows, num_columns = num_heads * head_rows // scheme.block[0], stored.shape[1]
        row_bytes = stored.num_bytes // stored.shape[0]
        part = replace(
            stored,
            shape=(num_rows, num_columns),
            offset=stored.offset + first * head_rows // scheme.block[0] * row_bytes,
            num_bytes=num_rows * row_bytes,
        )
        scales = (part, scheme)
    return replace(
        piece,
        offset=piece.offset + first * head_rows * columns,
        shape=(num_heads * head_rows, columns),
        rows=tuple(rows // piece.groups * num_heads for rows in piece.rows),
        groups=num_heads,
        scales=scales,
    )
