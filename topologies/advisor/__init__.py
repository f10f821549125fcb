"""Which layout suits the load that is there: observations in, candidates and an advice out; no torch and no clock."""
