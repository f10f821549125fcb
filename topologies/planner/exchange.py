"""How long rows take to their experts and back: latency and bytes of each link, once for each place a row goes to.

Not an exchange (moe.wide_ep.exchanges). Hockney's model (1994): t = latency + bytes / bandwidth, for dispatch and
combine of every MoE layer. Units: seconds, bytes, rows of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..exchange_cost import BETWEEN, WITHIN, ExchangeCost, bytes_sent
from ..grid import RankGrid
from .hardware import EXPERTS
from .routing import places_hit

if TYPE_CHECKING:
    from .step_time import Setting

COMBINE_ITEMSIZE = 2.0  # outputs of experts travel as bf16
# Of a collective of the ranks that divide attention: point to point in aiconfigurator's systems/*.yaml.
SHARING_LATENCY = 1e-5


@dataclass(frozen=True, kw_only=True)
class ExchangeTime:
    """All exchanges of a step.

    Attributes:
        num_bytes: that a rank sends.
        latency_seconds: before bytes count.
        bandwidth_seconds: for bytes.
    """

    num_bytes: float
    latency_seconds: float
    bandwidth_seconds: float

    @property
    def seconds(self) -> float:
        """Both."""
        return self.latency_seconds + self.bandwidth_seconds


def exchange_seconds(setting: Setting, own: float, *, is_decode: bool) -> ExchangeTime:
    """Return the exchanges of a step in which a rank has `own` rows.

    A row goes once to each rank that holds experts of it, or once for each expert where the machine's decode kernels
    do that; the rank itself costs nothing. Where somebody measured an exchange over such links, that is what it takes;
    else formulas say it. A group wider than a domain: what leaves a domain goes over the slow link,
    in prompts once for each domain (links inside forward it), and both links work at once.
    """
    footprint, ep, hardware = setting.model.footprint, setting.topology.ep, setting.hardware
    layers = footprint.num_moe_layers
    if ep == 1 or not layers:
        return ExchangeTime(num_bytes=0, latency_seconds=0, bandwidth_seconds=0)
    if setting.link is not None and _is_known(setting, setting.link):
        return _as_measured(setting, setting.link, own)
    size = hardware.domain_size
    domains = -(-ep // size)
    copies = footprint.top_k if is_decode and hardware.decode_copies == EXPERTS else _places(setting, ep)
    inside = min(ep, size)
    near = copies * (inside - 1) / ep
    far = copies * (ep - inside) / ep
    if not is_decode and domains > 1:
        far = _places(setting, domains) * (domains - 1) / domains
    row = footprint.hidden_size * (setting.model.payload_itemsize + COMBINE_ITEMSIZE)
    near_rate = hardware.scale_up_bandwidth * hardware.within_efficiency
    far_rate = hardware.scale_out_bandwidth * hardware.between_efficiency
    latency = hardware.dispatch_latency + hardware.combine_latency
    if domains > 1:
        latency = hardware.between_dispatch_latency + hardware.between_combine_latency
    moving = max(own * near * row / near_rate, own * far * row / far_rate)
    return ExchangeTime(
        num_bytes=own * (near + far) * row * layers,
        latency_seconds=latency * layers,
        bandwidth_seconds=moving * layers,
    )


def _is_known(setting: Setting, link: ExchangeCost) -> bool:
    grid = RankGrid(setting.topology, setting.hardware.domain_size)
    return link.link(BETWEEN if grid.spans_domains else WITHIN) is not None


def _as_measured(setting: Setting, link: ExchangeCost, own: float) -> ExchangeTime:
    footprint = setting.model.footprint
    grid = RankGrid(setting.topology, setting.hardware.domain_size)
    row_bytes = footprint.hidden_size * footprint.activation_itemsize
    near, far = bytes_sent(link.name, own, grid, footprint.top_k, row_bytes)
    layers = footprint.num_moe_layers
    return ExchangeTime(
        num_bytes=(near + far) * layers,
        latency_seconds=link.fixed_s * layers,
        bandwidth_seconds=(near * link.within_s + far * link.between_s) * layers,
    )


def attention_seconds(setting: Setting, rows: float) -> float:
    """Return what ranks that divide the heads of attention send each other in a step.

    Each layer gathers rows and adds partial outputs, a ring of bf16 rows each: (n - 1) / n of them (Chan et al., 2007).
    """
    atp, hardware = setting.topology.atp, setting.hardware
    if atp == 1:
        return 0.0
    rate = hardware.scale_up_bandwidth if atp <= hardware.domain_size else hardware.scale_out_bandwidth
    num_bytes = rows * setting.model.footprint.hidden_size * 2 * (atp - 1) / atp
    return 2 * setting.model.footprint.num_layers * (SHARING_LATENCY + num_bytes / rate)


def _places(setting: Setting, places: int) -> float:
    model = setting.model
    return places_hit(
        model.footprint.num_experts,
        model.footprint.top_k,
        places,
        groups=model.num_groups,
        top_groups=model.top_groups,
    )
