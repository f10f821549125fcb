"""Experts that move while serving: rounds of moves over all ranks (engine side), weights put in place (rank side)."""
