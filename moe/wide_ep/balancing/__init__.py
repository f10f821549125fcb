"""How much each expert gets (load windows, load files) and what a placement makes of it; pure: numpy in, arrays out."""

from .clocked import ClockedGain, PhaseTime
from .expected import expected_imbalance, expected_rows
from .ledger import Ledger, Planner, simulate
from .load_file import ExpertLoad, read_load, write_load
from .load_steps import LoadCollector, LoadSteps, PhaseLoad, total_steps
from .load_window import SlotWindow, logical_load, rank_imbalance
from .policy import Decision, Move, PolicyOptions, choose_moves
from .way_back import LayerModel

__all__ = [
    "ClockedGain",
    "Decision",
    "ExpertLoad",
    "LayerModel",
    "Ledger",
    "LoadCollector",
    "LoadSteps",
    "Move",
    "PhaseLoad",
    "PhaseTime",
    "Planner",
    "PolicyOptions",
    "SlotWindow",
    "choose_moves",
    "expected_imbalance",
    "expected_rows",
    "logical_load",
    "rank_imbalance",
    "read_load",
    "simulate",
    "total_steps",
    "write_load",
]
