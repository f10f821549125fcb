"""Engine, scheduler, workers and their processes (level 6)."""
