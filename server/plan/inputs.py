"""What `moewe plan` is asked: flags and files checked, and turned into the records that planning takes.

Not the planning (topologies/planner/). Reads config.json and headers of safetensors, no weights.
Units: as the help text of each flag says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...models.architecture import CHECKPOINT, architecture
from ...models.checkpoint import find_shards
from ...models.config import ConfigError, ModelConfig
from ...models.families import load_config
from ...models.headers import check_weights
from ...models.published import published_config, published_names
from ...models.source import resolve_model
from ...moe.wide_ep.balancing.load_file import read_load
from ...native.bandwidth import measure_read_bandwidth
from ...native.matrix_rate import measure_matrix_rate
from ...runtime.known_links import recall
from ...topologies.advisor.forecast import link_figure
from ...topologies.exchange_cost import ExchangeCost, LayoutLink
from ...topologies.hardware import available_memory_bytes, host_cores, host_memory_bytes
from ...topologies.layout import Layout, load_layout
from ...topologies.machine import HOST_CEILINGS, Machine
from ...topologies.planner.architecture import Architecture
from ...topologies.planner.hardware import FIGURES, LOCAL, Hardware, load_hardware, local_host
from ...topologies.planner.pools import CHUNK, UTILIZATION
from ...topologies.planner.routing import Popularity, measured, parse_popularity
from ...topologies.planner.search import Targets
from ...topologies.planner.serving import Workload, parse_workload
from ...topologies.spec import Topology, TopologyError

DEFAULT_HARDWARE = "h200"
MOST_GPUS = 4096
MOST_RANKS = 1 << 16  # of a plan, which names each of them
_FILL_SECONDS = 0.5  # of getting memory to measure: a plan answers within seconds


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What one command asks.

    Attributes:
        models: by format of weights, the model in it.
        checked: where its facts are from, in words.
        hardware, workload, popularity: see there.
        layout: pools by name; None searches all of `num_gpus`.
        num_gpus: that there are; 0 where a layout says it.
        targets: of a search.
        overlap: exchanges under experts.
        chunk: rows of prompts in a step on an attention replica.
        utilization: of a device's memory.
        price, watts: of a device; None where nobody says it.
        settings: flags that say how to plan, as they were given or taken.
        links: what exchanges of layouts took on this host, as ranks measured them; none where it is another machine.
    """

    models: dict[str, Architecture]
    checked: str
    hardware: Hardware
    workload: Workload
    popularity: Popularity
    layout: Layout | None
    num_gpus: int
    targets: Targets
    overlap: bool
    chunk: int
    utilization: float
    price: float | None
    watts: float | None
    settings: dict[str, Any]
    links: tuple[LayoutLink, ...] = ()

    @property
    def model(self) -> Architecture:
        """The model in the first format."""
        return next(iter(self.models.values()))

    def link(self, topology: Topology) -> ExchangeCost | None:
        """Return what was measured of the exchange of `topology`, else of its nearest width; None where nothing was."""
        if not self.links:
            return None
        host = Machine(
            num_devices=self.hardware.domain_size,
            memory_bytes=int(self.hardware.memory_bytes),
            domain_size=self.hardware.domain_size,
            ceilings=HOST_CEILINGS,
            is_shared=True,
            links=self.links,
        )
        figure = link_figure(host, topology)
        return None if figure is None else figure.cost


def read_asked(tool: Mapping[str, Any]) -> Asked:
    """Return what the flags ask.

    Raises:
        ValueError: one line with the flag, the value and the fix.
    """
    name = tool.get("model")
    if not name:
        raise ConfigError(f"no MODEL is given; name a folder, or one of {', '.join(published_names())}")
    config, title, checked = read_model(str(name))
    formats = [word.strip() for word in tool.get("weights", CHECKPOINT).split(",")]
    kv = tool.get("kv_cache_dtype", "auto")
    models = {weights: architecture(config, name=title, weights=weights, kv=kv) for weights in formats}
    searches = bool(tool.get("search"))
    _check_search(tool, searches, len(models))
    hardware = local_hardware() if (key := tool.get("hardware", DEFAULT_HARDWARE)) == LOCAL else load_hardware(key)
    chunk, utilization = tool.get("max_num_batched_tokens", CHUNK), tool.get("gpu_memory_utilization", UTILIZATION)
    _check("--max-num-batched-tokens", chunk, 1, 1 << 20)
    _check("--gpu-memory-utilization", utilization, 0.01, 1)
    for flag in ("price", "power"):
        if flag in tool:
            _check(f"--{flag}", tool[flag], 1e-6, 1e6)
    layout = None if searches else load_layout(tool.get("topology", "EP1DP1"), dialect=tool.get("dialect"))
    if layout is not None and layout.num_ranks > MOST_RANKS:
        raise TopologyError(
            f"--topology {tool['topology']!r} has {layout.num_ranks:,} ranks; a plan takes up to {MOST_RANKS:,}"
        )
    price, watts = tool.get("price"), tool.get("power", hardware.power_watts or None)
    popularity, overlap = tool.get("popularity", "uniform"), bool(tool.get("overlap"))
    return Asked(
        models=models,
        checked=checked,
        hardware=hardware,
        workload=parse_workload(tool.get("workload", "")),
        popularity=read_popularity(popularity, config),
        num_gpus=tool.get("gpus", hardware.domain_size) if searches else 0,
        targets=Targets(ttft=_seconds(tool, "max_ttft"), tpot=_seconds(tool, "max_tpot")),
        layout=layout,
        overlap=overlap,
        chunk=chunk,
        utilization=utilization,
        price=price,
        watts=watts,
        settings={
            "weights": formats,
            "kv_cache_dtype": kv,
            "popularity": popularity,
            "overlap": overlap,
            "max_num_batched_tokens": chunk,
            "gpu_memory_utilization": utilization,
            "price_of_gpu_hour": price,
            "watts_of_gpu": watts,
        },
        links=recall("cpu") if key == LOCAL else (),
    )


def read_model(name: str) -> tuple[ModelConfig, str, str]:
    """Return the config of a folder, of `demo`, or of a name in the table; what to call it; and what was looked at.

    Raises:
        ConfigError: it is none of these, or the folder's files do not belong together.
    """
    is_folder = Path(name).expanduser().is_dir()
    known_as = name if is_folder else name.rpartition("/")[2].lower()  # deepseek-ai/DeepSeek-V3 is in the table, too
    if known_as in published_names():
        return published_config(known_as), known_as, "config from the table of published models"
    if name != "demo" and not is_folder:
        known = ", ".join(published_names())
        raise ConfigError(f"model = {name[:80]!r} is no folder and not in the table; the table has {known}")
    folder = resolve_model(name)
    config = load_config(folder)
    title = name if name == "demo" else folder.name
    if not any(folder.glob("*.safetensors")):
        return config, title, "config.json (no weights beside it)"
    check_weights(folder, config)
    return config, title, f"config.json, and headers of {len(find_shards(folder).files)} safetensors files"


def read_popularity(text: str, config: ModelConfig) -> Popularity:
    """Return the popularity of experts that `text` means: uniform, zipf:EXPONENT, or a load file of `moewe record`.

    Raises:
        ValueError: it is none of these, or a load of another model.
    """
    if config.moe is None:
        return Popularity()
    num_experts = config.moe.routing.num_experts
    if text.lower().endswith(".json"):
        return measured(read_load(Path(text), num_layers=len(config.moe_layers), num_experts=num_experts).total)
    return parse_popularity(text, num_experts)


def local_hardware() -> Hardware:
    """Return this host as it measures now: memory and products of all cores."""
    cores = host_cores()
    rate = measure_matrix_rate(cores)
    host = local_host(
        cores=cores,
        memory_bytes=float(host_memory_bytes()),
        memory_bandwidth=measure_read_bandwidth(cores, available_memory_bytes(), _FILL_SECONDS).bytes_per_second,
        bf16_flops=rate.bf16 if rate else HOST_CEILINGS.flops,
        int8_flops=rate.int8 if rate else 0.0,
    )
    of_products = "measured now" if rate else "assumed"
    known = {
        "memory_bytes": "what the system lets this process use",
        "memory_bandwidth": "measured now",
        "bf16_flops": of_products,
        "int8_flops": of_products,
        "scale_up_size": "cores that this process may use",
    }
    guess = "assumed, by orders of magnitude; what ranks measured of an exchange goes before it"
    return replace(host, sources=tuple((name, known.get(name, guess)) for name in FIGURES if getattr(host, name)))


def _check_search(tool: Mapping[str, Any], searches: bool, formats: int) -> None:
    """Refuse flags that do not go together."""
    if searches:
        _check("--gpus", tool.get("gpus", 1), 1, MOST_GPUS)
        if "topology" in tool:
            raise ValueError(f"--topology {tool['topology']!r} names a layout and --search tries all; leave one out")
        return
    for flag in ("gpus", "max_ttft", "max_tpot", "plot", "top"):
        if flag in tool:
            raise ValueError(f"--{flag.replace('_', '-')} is for a search; add --search, or leave it out")
    if formats > 1:
        raise ValueError(f"--weights {tool['weights']!r} names {formats} formats, which takes --search; name one")


def _seconds(tool: Mapping[str, Any], flag: str) -> float | None:
    """Return a target in seconds, which a flag gives in ms."""
    if flag not in tool:
        return None
    _check(f"--{flag.replace('_', '-')}", tool[flag], 1e-3, 1e7)
    return float(tool[flag]) / 1e3


def _check(flag: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ValueError(f"{flag} {value:g} is not allowed; use {least:g} to {most:g}")
