"""The exchanges that bring rows to the ranks of their experts and back, behind one contract (part of wide_ep)."""

from .all_to_all import AllToAllExchange
from .contract import Dispatched, Exchange, StagedExchange
from .group_shape import GroupShape, SlowRate
from .hierarchical import HierarchicalExchange
from .joining import join_all_over_links, join_over_links, link_members
from .local import LocalExchange
from .padded import PaddedExchange
from .shm import ShmExchange, ShmShape
from .stepwise import StepwiseExchange
from .threads import ThreadExchange, ThreadHub
from .traffic import Traffic

__all__ = [
    "AllToAllExchange",
    "Dispatched",
    "Exchange",
    "GroupShape",
    "HierarchicalExchange",
    "LocalExchange",
    "PaddedExchange",
    "ShmExchange",
    "ShmShape",
    "SlowRate",
    "StagedExchange",
    "StepwiseExchange",
    "ThreadExchange",
    "ThreadHub",
    "Traffic",
    "join_all_over_links",
    "join_over_links",
    "link_members",
]
