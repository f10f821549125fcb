"""Placement of experts over ranks and the exchange between them (level 3)."""
