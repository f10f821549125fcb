"""A running server, asked by our tools: where it is, and one answer."""
