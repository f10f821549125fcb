"""The parts of a rank: its running batch, the sampler, and what its memory holds."""
