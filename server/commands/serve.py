"""`moewe serve`: hold the port, find the model, say what will run and what it costs, then serve.

Not the server (server/http/serve.py). The order matters: a port in use must be known before anything is loaded.
Units: bytes, ports.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
from typing import TYPE_CHECKING, Any

from ...runtime.config import EngineConfig
from ...runtime.options import layout_config
from ...runtime.params import MAX_CHOICES
from ...text.parsers import output_format
from ...topologies import expansion
from ..flags.values import Settings
from ..http.cors import checked_origins
from ..http.keys import KEY_VARIABLE, gather_keys
from ..http.tls import tls_context
from ..options import ServerOptions

if TYPE_CHECKING:
    from ...runtime.resolve import Resolved

log = logging.getLogger(__name__)

BACKLOG = 2048
MOST = 2**63


def serve(settings: Settings) -> int:
    """Serve until told to stop; returns the exit code."""
    options = server_options(settings.http)
    tls_context(options)
    config = config_of(settings)
    if options.dcgm_url is not None and config.parallel.device == "cpu":
        raise ValueError("--dcgm-url names counters of GPUs, but --device is cpu; leave it out, or use --device cuda")
    with bind(options.host, options.port) as listener:
        warn_of_open_door(listener, options)
        from ...runtime.generation_defaults import generation_defaults
        from ...runtime.resolve import check_checkpoint, resolve
        from ...runtime.session import locate

        config = locate(config)
        resolved = resolve(config)
        check_checkpoint(resolved)
        generation_defaults(config.model)
        from ..terminal.console import tell

        tell(announcement(resolved))
        from ..http.serve import run_server

        return run_server(resolved, options, listener)


def config_of(settings: Settings) -> EngineConfig:
    """Return the engine's config that was asked for, its topology read in the dialect that was named."""
    return layout_config(settings.engine, dialect=settings.shared.get("dialect"))


def server_options(http: dict[str, Any]) -> ServerOptions:
    """Return the server's options, ranges checked."""
    values = dict(http)
    port = values.get("port", 0)
    if not 0 <= port <= 65535:
        raise ValueError(f"--port {port} is not a port; use 0 to 65535")
    least_of = {"shutdown_timeout_s": 0.0, "log_stats_interval_s": 0.0, "max_body_bytes": 1024, "limit_concurrency": 1,
                "max_n": 1, "advice_interval_s": 1.0}  # fmt: skip
    for name, least in least_of.items():
        if name in values and not least <= values[name] < MOST:
            raise ValueError(f"{name}={values[name]!r} is not allowed; use at least {least:g}, and a finite number")
    if values.get("max_n", 1) > MAX_CHOICES:
        raise ValueError(f"--max-n {values['max_n']} is not allowed; use at most {MAX_CHOICES}")
    if not 0 < values.get("price_per_hour", 1.0) < MOST:
        raise ValueError(f"price_per_hour={values['price_per_hour']!r} is not allowed; use a number above 0")
    if (compat := values.get("metrics_compat")) is not None:
        from ...runtime.metrics.compat import STYLES

        if compat not in STYLES:
            raise ValueError(f"--metrics-compat {compat!r} is not known; use {' or '.join(STYLES)}")
    if (log_file := values.get("advice_log")) is not None:
        from ..http.advice_log import check_log

        check_log(log_file)
    if (exporter := values.get("dcgm_url")) is not None:
        from ..http.exporter_watch import check_exporter_url

        values["dcgm_url"] = check_exporter_url(exporter)
    output_format(values.get("tool_call_parser", "auto"), values.get("reasoning_parser", "auto"), None)
    keys = gather_keys(values.get("api_keys", ()), values.get("api_key_file"))
    return ServerOptions(**checked_origins(values) | {"api_keys": keys})


def warn_of_open_door(listener: socket.socket, options: ServerOptions) -> None:
    """Say so when other machines can reach a server that asks for no key, or for one that all on the way can read."""
    host = listener.getsockname()[0]
    if ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        return
    if not options.api_keys and not options.ssl_ca_certs:
        log.warning(
            "%s is open to other machines and no API key is asked: whoever reaches the port may use the model; set "
            "--api-key-file or %s, or leave out --host", host, KEY_VARIABLE,
        )  # fmt: skip
    elif options.api_keys and not options.ssl_certfile:
        log.warning("API keys cross the network unencrypted; use --ssl-certfile, or a proxy in front that does TLS")


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `host` and `port`: from now on nobody else can have the port.

    Raises:
        ValueError: names the port and what to do.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ValueError(
            f"--host {host!r} is not an address of this machine ({error}); use 127.0.0.1 or 0.0.0.0"
        ) from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Two sockets may both bind with SO_REUSEADDR as long as none listens, so listening is what claims the port.
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"port {port} on {host} is in use; stop what uses it or give another --port") from None
        if error.errno == errno.EACCES:
            raise ValueError(f"port {port} may not be used by this user; give a --port from 1024 on") from None
        raise ValueError(f"--host {host} with --port {port} cannot be bound: {error.strerror}") from None
    return listener


def announcement(resolved: Resolved) -> str:
    """Return what will run and what it costs, as printed before loading."""
    from ...runtime.placements import placement_note

    model = resolved.model
    num_experts = model.moe.routing.num_experts if model.moe is not None else 0
    unit = "GPU" if resolved.config.parallel.device == "cuda" else "rank"
    lines = [expansion(resolved.topology, num_experts=num_experts, unit=unit)]
    lines += filter(None, [placement_note(resolved.config, model)])
    return "\n".join([*lines, resolved.budget.table()])
