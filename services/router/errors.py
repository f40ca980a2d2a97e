"""Errors as HTTP answers in the OpenAI shape, and as the last event of a broken stream.

Every answer that is not a success is made here. Raises nothing and logs nothing.
"""

from __future__ import annotations

import math
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from kvferry.shared.errors import (
    AuthenticationFailed,
    InvalidRequest,
    KvferryError,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    RequestTimeout,
)

DEFAULT_RETRY_AFTER_S = 1.0


def error_body(error: KvferryError) -> dict[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`; `code` is a string or null."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }


def error_headers(error: KvferryError) -> dict[str, str]:
    """Retry-After where a retry may help, the challenge of a 401, and `close` where the request's rest is
    unread."""
    headers = {}
    if error.http_status in (409, 429, 503):
        seconds = error.retry_after_s if error.retry_after_s is not None else DEFAULT_RETRY_AFTER_S
        headers["retry-after"] = str(max(1, math.ceil(seconds)))
    if isinstance(error, AuthenticationFailed):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, PayloadTooLarge | RequestTimeout):
        headers["connection"] = "close"
    return headers


def error_response(error: KvferryError) -> JSONResponse:
    return JSONResponse(error_body(error), status_code=error.http_status, headers=error_headers(error))


def internal_error() -> KvferryError:
    """What a client is told of a failure that nobody foresaw; the log has the rest."""
    return KvferryError("The server failed unexpectedly; the request id names it in the server's log")


def from_http_exception(error: HTTPException, method: str, path: str) -> KvferryError:
    """The framework's own refusals: unknown routes and methods."""
    if error.status_code == 404:
        return NotFound(f"There is nothing at {method} {path}")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return MethodNotAllowed(f"{method} is not allowed for {path}; allowed: {allowed or 'another method'}")
    if 400 <= error.status_code < 500:
        return InvalidRequest(str(error.detail))
    return internal_error()
