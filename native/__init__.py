"""Machine facts that need measuring: memory bandwidth (level 0)."""
