"""Errors as OpenAI clients expect them: an object with message, type, param and code, and a fitting status.

Not the checks that raise them. Units: HTTP status codes, seconds.
"""

from __future__ import annotations

from typing import Any

RETRY_AFTER_S = 5
# The status of an answer that nobody reads, as the client hung up. It is no error answer.
CLIENT_GONE = 499


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        status: HTTP status.
        message: one line that names the field, the value and the fix.
        kind: the `type` of OpenAI's error object.
        param: the field to blame.
        code: a word for programs.
        headers: further response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """Return the error object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error for a request that the client must change."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str) -> ApiError:
    """Return the error for a request that may be sent again later, here or elsewhere."""
    headers = {"retry-after": str(RETRY_AFTER_S)}
    return ApiError(503, message, kind="service_unavailable", code=code, headers=headers)


def queue_full(message: str, retry_after_s: int = RETRY_AFTER_S) -> ApiError:
    """Return the error for a request that found every place taken; clients wait and send it again by themselves."""
    headers = {"retry-after": str(retry_after_s)}
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", headers=headers)


def server_error(message: str, code: str = "internal_error") -> ApiError:
    """Return the error for a request that failed through no fault of the client."""
    return ApiError(500, message, kind="server_error", code=code)
