"""What answers look like: bodies, chunks of streams, log-probabilities, the parts of a chat's message."""
