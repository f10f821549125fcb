"""What a user can set of the HTTP server; the engine's own settings are runtime.config.EngineConfig.

Not parsing (server/cli.py) and not the server (server/serve.py). Units: seconds, bytes.
"""

from __future__ import annotations

from importlib.metadata import version

import msgspec

VERSION = version("moewe")


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how to serve.

    Attributes:
        host, port: address to bind; loopback unless told otherwise.
        served_model_name: names under which requests may ask for the model; the first is reported.
        api_key: bearer token asked of every route but the open ones; None asks nothing.
        shutdown_timeout_s: how long SIGTERM lets running requests finish.
        max_body_bytes: larger request bodies are refused unread.
        log_stats_interval_s: a line of statistics this often while busy.
        tool_call_parser, reasoning_parser: formats of text/parsers, `auto` by the chat template, or `none`.
        enable_auto_tool_choice: as with vLLM; calls are read whenever a format is known, so it changes nothing.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] = ()
    api_key: str | None = None
    shutdown_timeout_s: float = 30.0
    max_body_bytes: int = 16 * 1024 * 1024
    log_stats_interval_s: float = 10.0
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    enable_auto_tool_choice: bool = False
