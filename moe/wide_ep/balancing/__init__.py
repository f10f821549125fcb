"""Balancing: how much each expert gets (load windows). Pure: numpy in, arrays out."""

from .load_window import SlotWindow, logical_load, rank_imbalance

__all__ = ["SlotWindow", "logical_load", "rank_imbalance"]
