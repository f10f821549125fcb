"""One line of a batch file in OpenAI's format, and the line that answers it.

Not the running (server/commands/run_batch.py) and not the checks of bodies, which are those of the HTTP server. A line
that cannot be read as a request gets an `error`; one that the server refuses gets its `response` with the status.
Units: JSON lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

URLS = ("/v1/completions", "/v1/chat/completions")
MAX_LINE_BYTES = 64 * 1024 * 1024
_FIELDS = ("custom_id", "method", "url", "body")


class LineError(Exception):
    """A line that is no request.

    Args:
        code: a word for programs.
        message: one line that says what to change.
        custom_id: of the line, when that much could be read.
    """

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


@dataclass(frozen=True, kw_only=True)
class BatchLine:
    """A request of a batch.

    Attributes:
        custom_id: the client's name for it.
        url: one of URLS.
        body: JSON, as it will be read by the route.
    """

    custom_id: str
    url: str
    body: bytes


def read_line(line: bytes) -> BatchLine:
    """Return the request on a line.

    Raises:
        LineError: there is none.
    """
    if len(line) > MAX_LINE_BYTES:
        raise LineError("line_too_long", f"the line has {len(line)} bytes; send at most {MAX_LINE_BYTES}")
    try:
        entry = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LineError("invalid_json_line", f"the line is not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise LineError("invalid_json_line", "the line is not a JSON object")
    custom_id = entry.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise LineError("invalid_custom_id", "custom_id is missing or no text; give every line its own")
    wrong = _problem(entry)
    if wrong is not None:
        raise LineError(*wrong, custom_id)
    return BatchLine(custom_id=custom_id, url=entry["url"], body=msgspec.json.encode(entry["body"]))


def _problem(entry: dict[str, Any]) -> tuple[str, str] | None:
    """Return code and message of what is wrong beside the name, None when nothing is."""
    unknown = next((name for name in entry if name not in _FIELDS), None)
    if unknown is not None:
        return "unknown_field", f"{unknown[:80]!r} is no field of a batch line; there are {', '.join(_FIELDS)}"
    if entry.get("method", "POST") != "POST":
        return "invalid_method", f"method={str(entry['method'])[:80]!r} is not allowed; use POST"
    if entry.get("url") not in URLS:
        return "invalid_url", f"url={str(entry.get('url'))[:80]!r} is not allowed; use {' or '.join(URLS)}"
    body = entry.get("body")
    if not isinstance(body, dict):
        return "invalid_body", "body is missing or no object; it is what the url takes"
    if body.get("stream"):
        return "stream_not_supported", "body.stream is not possible in a batch; leave it out"
    return None


def answer_line(number: int, custom_id: str, status: int, body: bytes) -> bytes:
    """Return the line of a request that the server answered, well or with an error status."""
    content = msgspec.json.decode(body)
    request_id = content.get("id") if isinstance(content, dict) else None
    response = {"status_code": status, "request_id": request_id or f"req_{number}", "body": content}
    return _line(number, custom_id, response, None)


def error_line(number: int, error: LineError) -> bytes:
    """Return the line of one that is no request."""
    return _line(number, error.custom_id, None, {"code": error.code, "message": str(error)})


def _line(number: int, custom_id: str | None, response: Any, error: Any) -> bytes:
    entry = {"id": f"batch_req_{number}", "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(entry) + b"\n"
