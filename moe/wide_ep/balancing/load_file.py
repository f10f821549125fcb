"""A load file: how many tokens each expert of each MoE layer got, by phase, and which fire together; as JSON to read.

Not a trace (traces.py keeps every choice) and not a window (load_window.py). `moewe record` writes one, `--eplb static`
reads one. A file from a stranger does no harm. Units: tokens. L MoE layers, E experts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from .load_window import PHASES

VERSION = 1
MAX_BYTES = 64 << 20  # 93 layers of 384 experts take less than one, their pairs five
# Pairs of a layer that are kept for each expert, those that fire together most.
PAIRS_PER_EXPERT = 8
_MOST = 2**53

_Count = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]
_Table = list[list[_Count]]
_Pair = tuple[_Count, _Count, _Count]


class _File(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What stands in a file."""

    moewe_load: int
    num_layers: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    num_experts: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    prefill: _Table | None = None
    decode: _Table | None = None
    together: list[list[_Pair]] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertLoad:
    """What experts got.

    Attributes:
        phases: `prefill` and `decode`, or one of them: [L, E] i64, of one shape.
        together: of each layer pairs of experts that fire together, [n, 3] i64: two ids, ascending, and by how many
            tokens more than by chance; empty: not known.
    """

    phases: dict[str, np.ndarray]
    together: tuple[np.ndarray, ...] = ()

    def __post_init__(self) -> None:
        shapes = {load.shape for load in self.phases.values()}
        if not self.phases or set(self.phases) - set(PHASES) or len(shapes) != 1 or len(next(iter(shapes))) != 2:
            raise ValueError(f"a load is [layers, experts] of {' and '.join(PHASES)}, or of one of them")

    @property
    def total(self) -> np.ndarray:
        """[L, E] i64, all phases together."""
        total: np.ndarray = np.sum(list(self.phases.values()), axis=0)
        return total


def write_load(load: ExpertLoad, path: Path) -> None:
    """Write `load`, a line a layer."""
    num_layers, num_experts = load.total.shape
    lines = [f'"moewe_load": {VERSION},', f'"num_layers": {num_layers},', f'"num_experts": {num_experts},']
    tables = []
    for phase, table in load.phases.items():
        rows = ",\n".join("  [" + ", ".join(map(str, row)) + "]" for row in table.astype(np.int64).tolist())
        tables.append(f'"{phase}": [\n{rows}\n]')
    if load.together:
        rows = ",\n".join(f"  {json.dumps(pairs.tolist())}" for pairs in load.together)
        tables.append(f'"together": [\n{rows}\n]')
    path.write_text("{\n" + "\n".join(lines) + "\n" + ",\n".join(tables) + "\n}\n")


def read_load(path: Path, *, num_layers: int, num_experts: int) -> ExpertLoad:
    """Read what `write_load` wrote, for a model of `num_layers` MoE layers with `num_experts` experts each.

    Raises:
        ValueError: there is no such file, it is no load file, or it is one of another model; names the field.
    """
    where = f"load file {str(path)!r}"
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{where} cannot be read: {error.strerror}") from None
    if len(text) > MAX_BYTES:
        raise ValueError(f"{where} is larger than {MAX_BYTES:,} bytes; no load of experts is")
    try:
        found = msgspec.json.decode(text, type=_File)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"{where} is no load file ({error}); `moewe record --load` writes one") from None
    if found.moewe_load != VERSION:
        raise ValueError(f"{where} has moewe_load={found.moewe_load}; this version reads {VERSION}, record it again")
    wanted = {"num_layers": num_layers, "num_experts": num_experts}
    for field, wants in wanted.items():
        if (has := getattr(found, field)) != wants:
            raise ValueError(f"{where} has {field}={has}, but the model has {wants}; record it with this model")
    phases = {}
    for phase, table in (("prefill", found.prefill), ("decode", found.decode)):
        if table is not None:
            if len(table) != num_layers or any(len(row) != num_experts for row in table):
                raise ValueError(f"{where}: {phase} must hold {num_layers} rows of {num_experts} numbers")
            phases[phase] = np.array(table, np.int64).reshape(num_layers, num_experts)
    if not phases:
        raise ValueError(f"{where} holds neither prefill nor decode; record it again")
    together = _checked_pairs(found.together, num_layers, num_experts, where)
    return ExpertLoad(phases=phases, together=together)


def _checked_pairs(
    together: list[list[_Pair]] | None, num_layers: int, num_experts: int, where: str
) -> tuple[np.ndarray, ...]:
    if together is None:
        return ()
    if len(together) != num_layers or any(len(pairs) > PAIRS_PER_EXPERT * num_experts for pairs in together):
        raise ValueError(
            f"{where}: together must hold {num_layers} lists of at most {PAIRS_PER_EXPERT * num_experts} pairs"
        )
    for pairs in together:
        for first, second, _ in pairs:
            if not first < second < num_experts:
                raise ValueError(
                    f"{where}: together has the pair {first}, {second}; use two experts, the lower first, "
                    f"below {num_experts}"
                )
    return tuple(np.array(pairs, np.int64).reshape(len(pairs), 3) for pairs in together)
