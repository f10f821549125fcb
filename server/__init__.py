"""HTTP, the OpenAI protocol and the command line (level 7)."""
