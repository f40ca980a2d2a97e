"""Errors as HTTP answers in the shape of OpenAI's or Anthropic's API: which field, its value, and what is
allowed.

`KvferryError`s become bodies and headers here, and the framework's own refusals become `KvferryError`s.
Raises and logs nothing.
"""

from __future__ import annotations

import json
import math
from typing import Any, Literal

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from typing_extensions import TypedDict

from kvferry.shared.errors import (
    AuthenticationFailed,
    InvalidRequest,
    KvferryError,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    PermissionDenied,
    RequestTimeout,
)

DEFAULT_RETRY_AFTER_S = 1.0

Path = tuple[str | int, ...]

_LITERAL_TYPES = frozenset({"literal_error", "float_type", "bool_type"})
# In a union, errors of the members that the value does not resemble are reported after the others.
_TYPE_ERRORS = frozenset({"string_type", "list_type", "int_type", "dict_type", "model_type", "none_required"})

UNKNOWN_FIELD = "unknown_field"
"""The reason of an error whose `param` is a name that the client made up."""


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """OpenAI's error object."""

    error: ErrorDetail


class MessagesErrorDetail(TypedDict):
    type: str
    message: str


class MessagesErrorBody(TypedDict):
    """Anthropic's error object, of `/v1/messages`."""

    type: Literal["error"]
    error: MessagesErrorDetail


_MESSAGES_PATH = "/v1/messages"
_MESSAGES_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: KvferryError) -> ErrorBody:
    code = error_code(error)
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": code}}


def error_code(error: KvferryError) -> str | None:
    """Return the error's code; for a server's error without one, why it was raised."""
    return error.code or (error.reason if error.http_status >= 500 else None)


def messages_error_body(error: KvferryError) -> MessagesErrorBody:
    other = "invalid_request_error" if error.http_status < 500 else "api_error"
    kind = _MESSAGES_TYPES.get(error.http_status, other)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def error_headers(error: KvferryError) -> dict[str, str]:
    """Return Retry-After if a retry may help, the challenge of a 401, and `close` if a part of the request is
    unread."""
    headers = {}
    if error.http_status in (409, 429, 503):
        seconds = error.retry_after_s if error.retry_after_s is not None else DEFAULT_RETRY_AFTER_S
        headers["retry-after"] = str(max(1, math.ceil(seconds)))
    if isinstance(error, AuthenticationFailed):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, PayloadTooLarge | RequestTimeout | AuthenticationFailed | PermissionDenied):
        headers["connection"] = "close"
    return headers


def error_response(error: KvferryError, path: str) -> JSONResponse:
    """Return the error's answer to a request of this path."""
    is_messages = path == _MESSAGES_PATH or path.startswith(f"{_MESSAGES_PATH}/")
    body = messages_error_body(error) if is_messages else error_body(error)
    return JSONResponse(body, status_code=error.http_status, headers=error_headers(error))


def internal_error() -> KvferryError:
    """Return the error that a client gets after an unexpected failure; the log has the rest."""
    return KvferryError("The server failed unexpectedly; the request id names it in the server's log")


def describe(value: object) -> str:
    """Return a JSON value for an error message, shortened if it is long."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**40:
        return f"an integer of about {int(math.log10(abs(value))) + 1} digits"
    text = ""
    for piece in json.JSONEncoder(ensure_ascii=False, default=repr).iterencode(value):
        text += piece
        if len(text) > 80:
            return f"{text[:77]}..."
    return text


def from_framework(error: Exception, method: str, path: str) -> KvferryError:
    """Translate the framework's refusals: unknown routes and methods, and fields that fail their types."""
    if isinstance(error, RequestValidationError):
        return wrong_field(error)
    if not isinstance(error, HTTPException) or error.status_code >= 500:
        return internal_error()
    if error.status_code == 404:
        return NotFound(f"There is nothing at {method} {path}")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return MethodNotAllowed(f"{method} is not allowed for {path}; allowed: {allowed or 'another method'}")
    return InvalidRequest(str(error.detail))


def wrong_field(refusal: RequestValidationError) -> InvalidRequest:
    """Make one field's error, with a dotted `param` (`messages[0].role`), its value and what is allowed."""
    found = [(_real_path(refusal.body, error), error) for error in refusal.errors()]
    # A value that fits no member of a union has one error for each member; the deepest is the most specific.
    path, first = max(found, key=lambda item: (len(item[0]), item[1]["type"] not in _TYPE_ERRORS))
    param, kind, message = _param_name(path)[:128], first["type"], first["msg"]
    value = describe(first["input"])
    if kind in _TYPE_ERRORS | _LITERAL_TYPES:
        kind, rules = "range", dict.fromkeys(_rule(error) for other, error in found if other == path)
        message = " or ".join(rules)
    texts = {
        "missing": f"{param} is missing",
        "extra_forbidden": f"Unknown field {describe(param)}",
        "unsupported": f"{param} {message}",
        "range": f"{param} is {value}; it must be {message}",
        "rule": f"{param} {message} (given: {value})",
    }
    text = texts.get(kind, f"{param} is not allowed: {message} (given: {value})")
    return InvalidRequest(text, param=param, reason=UNKNOWN_FIELD if kind == "extra_forbidden" else "")


def _rule(error: dict[str, Any]) -> str:
    if error["type"] in ("model_type", "dict_type", "model_attributes_type"):
        return "an object"
    message: str = error["msg"]
    return message.removeprefix("Input should be ")


def _real_path(body: Any, error: dict[str, Any]) -> Path:
    """Return the error's location in the body, without names that pydantic adds for members of a union."""
    path: list[str | int] = []
    here, location = body, error["loc"][1:]
    for index, segment in enumerate(location):
        inside = (isinstance(here, dict) and segment in here) or (
            isinstance(here, list) and isinstance(segment, int) and segment < len(here)
        )
        if inside:
            here = here[segment]
            path.append(segment)
        elif index == len(location) - 1 and error["type"] in ("missing", "extra_forbidden"):
            path.append(segment)
    return tuple(path)


def _param_name(path: Path) -> str:
    """Write `("messages", 0, "role")` as `messages[0].role`."""
    name = ""
    for segment in path:
        if isinstance(segment, int):
            name += f"[{segment}]"
        else:
            name += f".{segment}" if name else segment
    return name
