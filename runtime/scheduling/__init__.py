"""The parts of the scheduler: limits, requests, admission, policy, batch state, and the writing of plans."""
