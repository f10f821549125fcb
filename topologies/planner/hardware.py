"""What one GPU (or host) can do, from a table with a source for every figure, or from a YAML file of the same form.

Not a measurement (native/) and not a look at this machine (topologies/hardware.py); the files stand in
topologies/hardware/. Units: bytes, bytes/s, FLOP/s, seconds, watts; links in one direction.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..machine import HOST_CEILINGS
from ..spec import TopologyError
from ..yaml_file import parse_yaml_mapping, read_yaml_mapping
from .architecture import BF16, FP4, FP8, INT8

LOCAL = "local"
_FOLDER = Path(__file__).resolve().parents[1] / "hardware"
_EXAMPLE = "memory_bandwidth: {value: 4.8e+12, source: data sheet}"
RANKS, EXPERTS = "ranks", "experts"
_OPTIONAL = ("fp8_flops", "fp4_flops", "int8_flops", "power_watts")
# Above any machine of the table by orders of magnitude: a figure in another unit stands out.
_MOST = 1e18


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device and its links.

    Attributes:
        key: how it is called on a command line.
        name: for people.
        preliminary: some figures are not final.
        memory_bytes: what the driver shows.
        memory_bandwidth: of its data sheet, or measured.
        bf16_flops, fp8_flops, fp4_flops, int8_flops: dense products; 0 where it has none of that kind.
        scale_up_bandwidth, scale_up_size: of the fast links, and how many devices they join (a domain).
        scale_out_bandwidth: to devices of other domains.
        power_watts: of the device; 0 where nobody says it.
        dispatch_latency, combine_latency: of an exchange inside a domain, before bytes count.
        within_efficiency: part of `scale_up_bandwidth` that an exchange reaches.
        between_dispatch_latency, between_combine_latency, between_efficiency: the same between domains.
        decode_copies: `experts`: the exchange of decode steps sends a row once for each of its experts; `ranks`: once
            to each rank that has some.
        sources: by figure.
        is_shared: ranks divide one device among them (a CPU host).
    """

    key: str
    name: str
    memory_bytes: float
    memory_bandwidth: float
    bf16_flops: float
    scale_up_bandwidth: float
    scale_up_size: float
    scale_out_bandwidth: float
    dispatch_latency: float
    combine_latency: float
    within_efficiency: float
    between_dispatch_latency: float
    between_combine_latency: float
    between_efficiency: float
    decode_copies: str
    fp8_flops: float = 0.0
    fp4_flops: float = 0.0
    int8_flops: float = 0.0
    power_watts: float = 0.0
    preliminary: bool = False
    is_shared: bool = False
    sources: tuple[tuple[str, str], ...] = ()

    def flops(self, precision: str) -> float:
        """Return the rate of products in `precision`, or in a wider one where it has none, or where that is faster."""
        rates = {BF16: (self.bf16_flops,), FP8: (self.bf16_flops, self.fp8_flops)}
        rates[FP4] = (*rates[FP8], self.fp4_flops)
        rates[INT8] = (self.bf16_flops, self.int8_flops)  # B300 has less of int8 than of bf16
        return max(rates[precision])

    @property
    def domain_size(self) -> int:
        """Devices that fast links join."""
        return int(self.scale_up_size)


FIGURES = tuple(
    field.name for field in fields(Hardware) if field.name not in ("key", "name", "preliminary", "is_shared", "sources")
)


def local_host(
    *, cores: int, memory_bytes: float, memory_bandwidth: float, bf16_flops: float, int8_flops: float
) -> Hardware:
    """Return a CPU host whose ranks share what all `cores` reach together; links are orders of magnitude."""
    within, between = HOST_CEILINGS.within, HOST_CEILINGS.between
    return Hardware(
        key=LOCAL,
        name=f"this host, {cores} cores",
        memory_bytes=memory_bytes,
        memory_bandwidth=memory_bandwidth,
        bf16_flops=bf16_flops,
        int8_flops=int8_flops,
        scale_up_bandwidth=within.bandwidth,
        scale_up_size=cores,
        scale_out_bandwidth=between.bandwidth,
        dispatch_latency=within.latency,
        combine_latency=within.latency,
        within_efficiency=1.0,
        between_dispatch_latency=between.latency,
        between_combine_latency=between.latency,
        between_efficiency=1.0,
        decode_copies=RANKS,
        is_shared=True,
    )


def hardware_names() -> tuple[str, ...]:
    """Return the names of the table, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def load_hardware(name: str) -> Hardware:
    """Return the machine called `name`, or described by the YAML file `name`.

    Raises:
        TopologyError: there is none of that name, or a figure is missing, unknown, without source or out of range.
    """
    if name.lower().endswith((".yaml", ".yml")):
        return _from_mapping(read_yaml_mapping(Path(name), example=_EXAMPLE), key=name, where=f"file {name!r}")
    if name not in hardware_names():
        known = [*hardware_names(), LOCAL]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? it" if near else "it"
        raise TopologyError(f"hardware {name!r} is not in the table; {hint} has {', '.join(known)}, or takes a .yaml")
    text = (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    return _from_mapping(parse_yaml_mapping(text, where=f"hardware {name}"), key=name, where=f"hardware {name}")


def _from_mapping(data: dict[str, Any], *, key: str, where: str) -> Hardware:
    unknown = [entry for entry in data if entry not in (*FIGURES, "name", "preliminary")]
    if unknown:
        raise TopologyError(f"{where} has the unknown entry {unknown[0]!r}; known are name, preliminary, "
                            f"{', '.join(FIGURES)}")  # fmt: skip
    missing = [figure for figure in FIGURES if figure not in data and figure not in _OPTIONAL]
    if missing:
        raise TopologyError(f"{where} lacks {missing[0]}; write for example `{_EXAMPLE}`")
    title, preliminary = data.get("name", key), data.get("preliminary", False)
    if not isinstance(title, str) or not isinstance(preliminary, bool):
        raise TopologyError(f"{where}: name must be text and preliminary true or false")
    values: dict[str, Any] = {}
    sources = []
    for figure in FIGURES:
        if figure not in data:
            continue
        entry = data[figure]
        if not isinstance(entry, dict) or set(entry) != {"value", "source"} or not isinstance(entry["source"], str):
            raise TopologyError(f"{where}: {figure} is {entry!r}; give value and source, like `{_EXAMPLE}`")
        values[figure] = _checked(figure, entry["value"], where)
        sources.append((figure, entry["source"]))
    return Hardware(key=key, name=title, preliminary=preliminary, sources=tuple(sources), **values)


def _checked(figure: str, value: Any, where: str) -> Any:
    if figure == "decode_copies":
        if value not in (RANKS, EXPERTS):
            raise TopologyError(f"{where}: decode_copies is {value!r}; use {RANKS} or {EXPERTS}")
        return value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not 0 < value <= _MOST:
        hint = " (YAML reads 4.8e12 as text; write 4.8e+12)" if isinstance(value, str) else ""
        raise TopologyError(f"{where}: {figure} is {value!r}; use a number above 0{hint}")
    if figure.endswith("efficiency") and value > 1:
        raise TopologyError(f"{where}: {figure} is {value}; it is a part of a bandwidth, at most 1")
    if figure == "scale_up_size" and value != int(value):
        raise TopologyError(f"{where}: scale_up_size is {value}; use a whole number")
    return value
