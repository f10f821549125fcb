"""Decode steps that a GPU replays: which shapes are captured, what a step takes, and the capturing and replaying."""
