"""Channels, processes and threads of engines and ranks, and the watch over them."""
