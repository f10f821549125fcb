"""TLS of the HTTP server: certificate files to a context, checked before anything is loaded.

Not the server (server/http/serve.py). Files are read once, at start.
Units: paths of PEM files.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from ..options import ServerOptions


def tls_context(options: ServerOptions) -> ssl.SSLContext | None:
    """Return the context that `options` ask for, None without TLS.

    With `ssl_ca_certs` a client must show a certificate that one of these authorities signed.

    Raises:
        ValueError: a file is missing, or does not fit the others; one line.
    """
    certfile, keyfile, authorities = options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs
    if certfile is None:
        alone = "--ssl-keyfile" if keyfile is not None else "--ssl-ca-certs" if authorities is not None else None
        if alone is not None:
            raise ValueError(f"{alone} does nothing without --ssl-certfile; give the certificate too")
        return None
    for flag, path in (("certfile", certfile), ("keyfile", keyfile), ("ca-certs", authorities)):
        _check_readable(flag, path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certfile, keyfile, password=_no_password)
    except (ssl.SSLError, OSError, ValueError) as error:
        raise ValueError(
            f"--ssl-certfile {certfile!r} and --ssl-keyfile {keyfile!r} are no certificate and its key in PEM, "
            f"without a password ({_reason(error)})"
        ) from None
    if authorities is not None:
        try:
            context.load_verify_locations(authorities)
        except (ssl.SSLError, OSError, ValueError) as error:
            raise ValueError(
                f"--ssl-ca-certs {authorities!r} holds no certificates in PEM ({_reason(error)})"
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _check_readable(flag: str, path: str | None) -> None:
    if path is None:
        return
    try:
        Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"--ssl-{flag} {path!r} cannot be read: {reason}; check path and rights") from None


def _no_password() -> str:
    """Without it OpenSSL would ask on the terminal, which a server may not have."""
    return ""


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error)
