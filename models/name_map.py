"""Which stored tensor holds which parameters, and how they lie in it.

Not reading and not about ranks: every parameter of the whole model is found, one name an expert and projection.
Offsets count elements of the stored tensor. Names of the files come from strangers and are only looked up.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ..quant import FP8_BLOCK, QuantScheme
from .config import ConfigError, ModelConfig
from .json_fields import show
from .parameters import (
    EMBEDDING,
    HEAD,
    HEAD_BIAS,
    global_parameters,
    layer_parameters,
    layer_prefix,
    names_of,
    scheme_of,
)
from .safetensors_file import LOADABLE, StoredTensor
from .tensor_names import Spelling

_STORED_AS = {"uint8": "U8", "float8_e4m3fn": "F8_E4M3"}
_IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
_IN_LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,8})\.(.+)")
_EXPERT = re.compile(r"(.*\.experts\.)(0|[1-9][0-9]{0,8})(\..+)")
_PER_VOCABULARY = (EMBEDDING, HEAD, HEAD_BIAS)
_KV_B_SCALE = "self_attn.kv_b_proj.weight_scale_inv"


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A run of elements of a stored tensor, and the parameters in it.

    Attributes:
        stored: the tensor.
        offset: of the first element.
        shape: of the run, [rows], [rows, columns], or [columns, rows] where `transposed`.
        parts: the parameters, by our whole names.
        rows: of each part.
        groups: 1: all rows of a part lie together; more: that many times a share of each part in turn.
        transposed: columns come first.
        scales: of a run that is dequantised while it is loaded, with their scheme.
        row_stride: elements from one row to the next where a plain piece has but some columns; 0: rows lie together.
    """

    stored: StoredTensor
    offset: int
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    rows: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    scales: tuple[StoredTensor, QuantScheme] | None = None
    row_stride: int = 0

    @property
    def is_plain(self) -> bool:
        """True when each part is a run of its own, in the order in which it is held."""
        return self.groups == 1 and not self.transposed and self.scales is None


@dataclass(frozen=True, kw_only=True)
class Matched:
    """What the tensors of a checkpoint are.

    Attributes:
        pieces: every parameter of the model is in exactly one.
        ignored: stored tensors that nothing needs, by the explicit lists.
        padded: stored tensors with more rows than the vocabulary has; the rows behind it are not needed.
    """

    pieces: tuple[Piece, ...]
    ignored: tuple[str, ...]
    padded: tuple[str, ...]


def match_tensors(tensors: Mapping[str, StoredTensor], config: ModelConfig) -> Matched:
    """Find the stored tensor of every parameter, experts one by one or stacked.

    Raises:
        ConfigError: a parameter is missing or given twice, a tensor has another shape or number format than the config
            calls for, or a tensor is neither a parameter nor on the list of those to ignore.
    """
    return _Matcher(tensors=tensors, config=config).run()


@dataclass(kw_only=True)
class _Matcher:
    tensors: Mapping[str, StoredTensor]
    config: ModelConfig
    pieces: list[Piece] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    padded: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    found: dict[str, str] = field(default_factory=dict)  # parameter -> stored name

    def run(self) -> Matched:
        config = self.config
        self.globals = global_parameters(config)
        self.layers = [layer_parameters(config, layer) for layer in range(config.num_layers)]
        self.extra_layers = set(self._extra_layers())
        for name, stored in self.tensors.items():
            bare = self._bare(name)
            if self._is_ignored(name, bare):
                self.ignored.append(name)
                continue
            for piece in self._pieces(bare, stored):
                self._add(piece)
        if self.unknown:
            raise ConfigError(
                f"weight files hold {_count(self.unknown)} that {config.family} with this config.json does not have; "
                "config.json belongs to another model, or the model has a part that this version does not run"
            )
        missing = list(dict.fromkeys(self._missing()))
        if missing:
            raise ConfigError(_missing_message(missing))
        return Matched(pieces=tuple(self.pieces), ignored=tuple(self.ignored), padded=tuple(self.padded))

    def _bare(self, name: str) -> str:
        """Return `name` without what the family may put in front of it."""
        for prefix in names_of(self.config).prefixes:
            if prefix and name.startswith(prefix):
                return name.removeprefix(prefix)
        return name

    def _extra_layers(self) -> Iterator[int]:
        """Yield the numbers past the last layer that are layers for multi-token prediction."""
        if names_of(self.config).extra_layers:
            for name in self.tensors:
                at = _IN_LAYER.fullmatch(self._bare(name))
                if at is not None and int(at[1]) >= self.config.num_layers and at[2] == "eh_proj.weight":
                    yield int(at[1])

    def _is_ignored(self, name: str, bare: str) -> bool:
        extra = names_of(self.config).extra
        if _IGNORED.search(name) or name.startswith(extra) or bare.startswith(extra):
            return True
        if self.config.head_tied and bare == HEAD:
            return True
        at = _IN_LAYER.fullmatch(bare)
        return at is not None and int(at[1]) in self.extra_layers

    def _pieces(self, bare: str, stored: StoredTensor) -> Iterable[Piece]:
        if bare in self.globals:
            return [self._global_piece(bare, stored)]
        at = _IN_LAYER.fullmatch(bare)
        if at is not None and int(at[1]) < self.config.num_layers:
            layer, inside, expert = int(at[1]), at[2], None
            numbered = _EXPERT.fullmatch(inside)
            if numbered is not None:
                inside, expert = f"{numbered[1]}#{numbered[3]}", int(numbered[2])
            spelling = names_of(self.config).by_stored.get(inside)
            if spelling is not None and self._has(layer, spelling, expert):
                return self._layer_pieces(layer, spelling, expert, stored)
            if inside == _KV_B_SCALE and self._kv_b_scheme(layer) is not None:
                return ()
        self.unknown.append(stored.name)
        return ()

    def _has(self, layer: int, spelling: Spelling, expert: int | None) -> bool:
        """True when the model has the parameters of `spelling`, and that expert."""
        moe, parameters = self.config.moe, self.layers[layer]
        if not all(own in parameters for own in spelling.own):
            return False
        return expert is None or (moe is not None and expert < moe.routing.num_experts)

    def _global_piece(self, name: str, stored: StoredTensor) -> Piece:
        shape = self.globals[name].shape
        if name in _PER_VOCABULARY and stored.shape[1:] == shape[1:] and len(stored.shape) == len(shape):
            if stored.shape[0] > shape[0]:
                self.padded.append(stored.name)
            elif stored.shape[0] < shape[0]:
                raise ConfigError(
                    f"{show(stored.name)} has {stored.shape[0]} rows for vocab_size = {shape[0]} tokens; "
                    "correct vocab_size in config.json, or fetch the weights again"
                )
        else:
            _check_shape(stored, shape)
        _check_dtype(stored, None)
        return Piece(stored=stored, offset=0, shape=shape, parts=(name,), rows=shape[:1])

    def _layer_pieces(
        self, layer: int, spelling: Spelling, expert: int | None, stored: StoredTensor
    ) -> Iterator[Piece]:
        parts = [self.layers[layer][own] for own in spelling.own]
        scheme = self._kv_b_scheme(layer) if spelling.order == "heads" else None
        _check_dtype(stored, "float8_e4m3fn" if scheme is not None else parts[0].dtype)
        rows = tuple(math.prod(part.shape[:-1]) if len(part.shape) > 1 else part.shape[0] for part in parts)
        columns = parts[0].shape[-1:] if len(parts[0].shape) > 1 else ()
        shape = (*columns, sum(rows)) if spelling.transposed else (sum(rows), *columns)
        stored_shape = (sum(rows), columns[0] // 16, 16) if spelling.stored.endswith("_blocks") else shape
        is_stack = expert is None and "#" in spelling.own[0]
        count = self.config.moe.routing.num_experts if is_stack and self.config.moe is not None else 1
        _check_shape(stored, ((count,) if is_stack else (1,) if spelling.unsqueezed else ()) + stored_shape)
        self._check_blocks(layer, spelling, stored)
        scales = (self._kv_b_scales(stored, scheme), scheme) if scheme is not None else None
        groups = {"parts": 1, "rows": rows[0], "heads": self.config.num_heads}[spelling.order]
        prefix, size = layer_prefix(layer), math.prod(shape)
        for i in range(count):
            number = str(i if is_stack else expert)
            yield Piece(
                stored=stored,
                offset=i * size,
                shape=shape,
                parts=tuple(prefix + own.replace("#", number) for own in spelling.own),
                rows=rows,
                groups=groups if len(rows) > 1 else 1,
                transposed=spelling.transposed,
                scales=scales,
            )

    def _check_blocks(self, layer: int, spelling: Spelling, stored: StoredTensor) -> None:
        """Refuse parts in one tensor whose blocks do not begin where the parts do."""
        if len(spelling.own) == 1 or not spelling.own[0].endswith(".weight_scale") or spelling.order != "parts":
            return
        scheme = scheme_of(self.config, layer, [own.removesuffix(".weight_scale") for own in spelling.own])
        assert scheme is not None
        weight = self.layers[layer][spelling.own[0].removesuffix("_scale")]
        if scheme.kind == FP8_BLOCK and weight.shape[0] % scheme.block[0]:
            raise ConfigError(
                f"{show(stored.name)} scales blocks of {scheme.block[0]} rows, which do not divide the "
                f"{weight.shape[0]} rows of a projection; store the projections one by one"
            )

    def _kv_b_scheme(self, layer: int) -> QuantScheme | None:
        return scheme_of(self.config, layer, ["self_attn.kv_b_k"]) if self.config.latent is not None else None

    def _kv_b_scales(self, stored: StoredTensor, scheme: QuantScheme) -> StoredTensor:
        """Return the scales of the one matrix that is dequantised while it is loaded."""
        scales = self.tensors.get(f"{stored.name}_scale_inv")
        if scales is None:
            raise ConfigError(_missing_message([f"{stored.name}_scale_inv"]))
        _check_dtype(scales, None)
        _check_shape(scales, scheme.scales_shape(stored.shape[0], stored.shape[1]))
        return scales

    def _add(self, piece: Piece) -> None:
        for parameter in piece.parts:
            if parameter in self.found:
                raise ConfigError(
                    f"{show(piece.stored.name)} and {show(self.found[parameter])} both hold {parameter}; "
                    "remove one of them"
                )
            self.found[parameter] = piece.stored.name
        self.pieces.append(piece)

    def _missing(self) -> Iterator[str]:
        """Yield the stored names of the parameters that no tensor holds."""
        yield from (name for name in self.globals if name not in self.found)
        names, moe = names_of(self.config), self.config.moe
        for layer, parameters in enumerate(self.layers):
            prefix = layer_prefix(layer)
            for own in parameters:
                numbers = range(moe.routing.num_experts) if "#" in own and moe is not None else (0,)
                for number in map(str, numbers):
                    if prefix + own.replace("#", number) not in self.found:
                        yield prefix + names.stored_for(own)[0].replace("#", number)


def _check_shape(stored: StoredTensor, shape: tuple[int, ...]) -> None:
    if stored.shape != shape:
        raise ConfigError(
            f"{show(stored.name)} has shape {list(stored.shape)} where config.json calls for {list(shape)}; "
            "config.json belongs to another model, or the weights do"
        )
    assert math.prod(shape) > 0


def _check_dtype(stored: StoredTensor, held: str | None) -> None:
    """Refuse a stored number format that cannot become `held` (None: the model's)."""
    packed = _STORED_AS.get(held) if held is not None else None
    if packed is not None and stored.dtype != packed:
        raise ConfigError(
            f"{show(stored.name)} is stored as {stored.dtype} where quantization_config calls for {packed}; "
            "name its module in modules_to_not_convert if it is not quantised"
        )
    if packed is None and stored.dtype not in LOADABLE:
        raise ConfigError(
            f"{show(stored.name)} is stored as {stored.dtype}, which this version does not load there; "
            "use weights in bfloat16, float16 or float32, or correct quantization_config in config.json"
        )


def _missing_message(names: list[str]) -> str:
    if names == [HEAD]:
        return (
            f"weight files lack {HEAD}, and config.json does not tie it: set tie_word_embeddings to true in it if the "
            "head is the embedding matrix, or supply the tensor"
        )
    return f"weight files lack {_count(names)}; an incomplete download, or config.json belongs to another model"


def _count(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{len(names)} tensor{'s' * (len(names) > 1)} ({', '.join(show(n) for n in names[:limit])}{more})"
