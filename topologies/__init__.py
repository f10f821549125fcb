"""EPxDPy grammar, rank grid, footprint records, byte budget, and the choice of a topology by cost (level 1)."""

from .budget import ByteBudget, byte_budget, check_fits, check_runnable, format_bytes
from .choice import AUTO, choose_topology
from .expansion import expansion
from .footprint import ModelFootprint
from .grid import RankGrid, placement_summary, slot_ranges
from .kv_sizes import KVGroup, StepLimits
from .layout import Layout, RequestClass, load_layout, preset_names
from .machine import Machine
from .spec import DIALECTS, Topology, TopologyError, make_topology, parse_topology

__all__ = [
    "AUTO",
    "DIALECTS",
    "ByteBudget",
    "KVGroup",
    "Layout",
    "Machine",
    "ModelFootprint",
    "RankGrid",
    "RequestClass",
    "StepLimits",
    "Topology",
    "TopologyError",
    "byte_budget",
    "check_fits",
    "check_runnable",
    "choose_topology",
    "expansion",
    "format_bytes",
    "load_layout",
    "make_topology",
    "parse_topology",
    "placement_summary",
    "preset_names",
    "slot_ranges",
]
