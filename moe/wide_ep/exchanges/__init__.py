"""The exchanges that bring rows to the ranks of their experts and back, behind one contract (part of wide_ep)."""

from .all_to_all import AllToAllExchange
from .contract import Dispatched, Exchange
from .local import LocalExchange
from .shm import ShmExchange, ShmShape
from .threads import ThreadExchange, ThreadHub

__all__ = [
    "AllToAllExchange",
    "Dispatched",
    "Exchange",
    "LocalExchange",
    "ShmExchange",
    "ShmShape",
    "ThreadExchange",
    "ThreadHub",
]
