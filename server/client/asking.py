"""A running server, asked from a command: which one flags name, and its answer to one request, or why there is none.

Not the load tools' client (server/bench/client.py), which streams and measures. What a server says is not trusted: it
is read up to a limit. Units: bytes, seconds.
"""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from .target import Target, read_target

DEFAULT_URL = "http://127.0.0.1:8000"


class NoAnswerError(RuntimeError):
    """A server that did not answer as was hoped; the text is one line that says why."""

    exit_code = 1


def key_hint(error: urllib.error.HTTPError) -> str:
    """Return what to do about an answer with an error status, as far as its code says."""
    return "; give --api-key" if error.code in (401, 403) else ""


def server_at(url: str, tool: Mapping[str, Any]) -> Target:
    """Return the server at `url`, with or without http:// and /v1, and the headers that flags and environment name.

    Raises:
        ValueError: names the URL or the flag.
    """
    try:
        return read_target({**tool, "base_url": url if "://" in url else f"http://{url}"}, os.environ)
    except ValueError as error:
        raise ValueError(str(error).replace("--base-url", f"URL {url!r}")) from None


def ask(
    url: str,
    headers: Mapping[str, str],
    *,
    timeout: float,
    most_bytes: int,
    line: Callable[[object], str],
    method: str = "GET",
    explain: Callable[[urllib.error.HTTPError], str] = key_hint,
) -> bytes:
    """Return the body of an answer.

    Args:
        url, headers, method: of the request.
        timeout: of each wait for the server.
        most_bytes: of the body.
        line: makes one line of what went wrong.
        explain: what follows the code of an answer with an error status.

    Raises:
        NoAnswerError: it did not answer, or with an error, or with too much.
    """
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            body: bytes = answer.read(most_bytes + 1)
    except urllib.error.HTTPError as error:
        raise NoAnswerError(f"{url} answers {error.code}{explain(error)}") from None
    except urllib.error.URLError as error:
        hint = "; is a server running there?" if isinstance(error.reason, ConnectionRefusedError) else ""
        raise NoAnswerError(f"{url}: {line(error.reason)}{hint}") from None
    except (OSError, ValueError) as error:
        raise NoAnswerError(f"{url}: {line(error)}") from None
    except Exception as error:  # http.client raises classes of its own for what is no HTTP
        raise NoAnswerError(f"{url} does not speak HTTP: {type(error).__name__}") from None
    if len(body) > most_bytes:
        raise NoAnswerError(f"{url} answers more than {most_bytes >> 20} MiB")
    return body
