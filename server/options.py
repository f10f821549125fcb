"""What a user can set of the HTTP server; the engine's own settings are runtime.config.EngineConfig.

Not parsing (server/cli/main.py) and not the server (server/http/serve.py). Units: seconds, bytes.
"""

from __future__ import annotations

from importlib.metadata import version

import msgspec

from ..runtime.params import MAX_CHOICES

VERSION = version("moewe")


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how to serve.

    Attributes:
        host, port: address to bind; loopback unless told otherwise.
        served_model_name: names under which requests may ask for the model; the first is reported.
        api_keys: one of these bearer tokens is asked of every route but the open ones; none asks nothing.
        api_key_file: where further keys come from; `api_keys` holds them once they are read.
        allowed_origins: web pages of other origins that may call the API; none unless asked, `*` is all.
        allow_credentials, allowed_methods, allowed_headers: what those pages may send; none named is all.
        ssl_certfile, ssl_keyfile: PEM files for TLS; without a key file the certificate's holds it.
        ssl_ca_certs: clients must show a certificate of these authorities.
        limit_concurrency: connections that may be open at once.
        disable_access_log: no line a request.
        shutdown_timeout_s: how long SIGTERM lets running requests finish.
        max_body_bytes: larger request bodies are refused unread.
        max_n: choices that one prompt may have.
        log_stats_interval_s: a line of statistics this often while busy.
        metrics_compat: /metrics has our figures under the names of this server, too: vllm or sglang.
        price_per_hour: what the server costs, all ranks, in any currency; /metrics then tells the cost of tokens.
        advice_log: a file that advice about the layout is written to, with what led to it, a JSON object a line.
        advice_interval_s: how long a window is after which the advisor says something.
        allow_apply: whoever may send requests may also have the layout changed.
        dcgm_url: an exporter of counters of GPUs; None: only what ranks can ask themselves.
        tool_call_parser, reasoning_parser: formats of text/parsers, `auto` by the chat template, or `none`.
        enable_auto_tool_choice: as with vLLM; calls are read whenever a format is known, so it changes nothing.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    api_key_file: str | None = None
    allowed_origins: tuple[str, ...] = ()
    allow_credentials: bool = False
    allowed_methods: tuple[str, ...] = ()
    allowed_headers: tuple[str, ...] = ()
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    limit_concurrency: int = 16384
    disable_access_log: bool = False
    shutdown_timeout_s: float = 30.0
    max_body_bytes: int = 16 * 1024 * 1024
    max_n: int = MAX_CHOICES
    log_stats_interval_s: float = 10.0
    metrics_compat: str | None = None
    price_per_hour: float | None = None
    advice_log: str | None = None
    advice_interval_s: float = 30.0
    allow_apply: bool = False
    dcgm_url: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    enable_auto_tool_choice: bool = False

    def __repr__(self) -> str:
        """Everything but the keys: wherever options are shown, keys are not."""
        shown = [f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name != "api_keys"]
        return f"ServerOptions({', '.join(shown)}, {len(self.api_keys)} API keys)"
