"""How much each expert gets (load windows, load files) and what a placement makes of it; pure: numpy in, arrays out."""

from .expected import expected_imbalance, expected_rows
from .load_file import ExpertLoad, read_load, write_load
from .load_window import SlotWindow, logical_load, rank_imbalance

__all__ = [
    "ExpertLoad",
    "SlotWindow",
    "expected_imbalance",
    "expected_rows",
    "logical_load",
    "rank_imbalance",
    "read_load",
    "write_load",
]
