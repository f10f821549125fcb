"""Flags of the command line: one table, and the values that come of them."""
