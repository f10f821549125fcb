"""HTTP, the OpenAI protocol and the command line (level 7).

A body comes in by `protocol` (what it may say) and `intake` (what an engine takes), an answer goes out by `answers`,
and `http` joins them with routes, a door and the life of the process; `openapi` tells what the API is. `cli` reads a
command line by the table in `flags` and runs one of `commands`, or a tool: `bench`, `eval`, `top`, `trace`, which ask
a running server by `client` and write by `terminal`. What all share stands beside the folders: errors, options, the
live requests (hub) and what the server knows while it runs (state).
"""
