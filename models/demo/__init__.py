"""The demo checkpoint: a dense model carved into a true MoE."""
