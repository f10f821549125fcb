"""Attention over paged KV (level 3)."""
