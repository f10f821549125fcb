"""EPxDPy grammar, rank grid, footprint records and byte budget (level 1)."""
