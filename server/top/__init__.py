"""`moewe top`: what servers do right now, from their /metrics and /v1/topology, as a live view or as JSON."""
