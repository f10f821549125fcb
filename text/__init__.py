"""Tokeniser, chat template, incremental detokeniser and stop matcher; no torch (level 1)."""
