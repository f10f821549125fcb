"""One generic MoE decoder, a table of families, and weight loading (level 5)."""
