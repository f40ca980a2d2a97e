"""Errors as gRPC statuses and back, for both ends of a control call.

The details carry the message; trailing metadata carries class, reason, param and retry-after.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import grpc

from kvferry.shared import errors
from kvferry.shared.control.seal import Seal
from kvferry.shared.errors import (
    OTHER_RELEASE,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    KvferryError,
    Overloaded,
    WorkerUnavailable,
)
from kvferry.shared.process.version import VERSION

CLASS_KEY = "kvferry-error-class"
REASON_KEY = "kvferry-error-reason"
PARAM_KEY = "kvferry-error-param-bin"
RETRY_AFTER_KEY = "kvferry-error-retry-after-s"
SEAL_KEY = "kvferry-error-seal"
_SEALED_KEYS = (CLASS_KEY, REASON_KEY, PARAM_KEY, RETRY_AFTER_KEY)

_MAX_MESSAGE_BYTES = 2000
_MAX_PARAM_BYTES = 256
_CLASSES: Mapping[str, type[KvferryError]] = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, KvferryError)
}
_BY_STATUS: Mapping[grpc.StatusCode, type[KvferryError]] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
}
"""The statuses that gRPC itself answers. All others mean that a worker cannot be reached, whatever bytes
caused them: a worker's own errors name their class."""

Metadata = tuple[tuple[str, str | bytes], ...]
Status = tuple[grpc.StatusCode, str, Metadata]


def to_status(error: KvferryError, seal: Seal | None) -> Status:
    """Return status code, details and trailing metadata of an error, bounded so that headers stay small.

    A message that this release does not know is not the client's mistake, and another worker may know it.

    Args: seal: of the call, not used yet. It detects damaged statuses and those of other calls.
    """
    if error.reason == OTHER_RELEASE and isinstance(error, InvalidRequest):
        error = Overloaded(f"in kvferry {VERSION}, {error.message}", reason=OTHER_RELEASE)
    metadata: list[tuple[str, str | bytes]] = [
        # or its nearest base in the error tree
        (CLASS_KEY, next(base.__name__ for base in type(error).__mro__ if base.__name__ in _CLASSES)),
        (REASON_KEY, error.reason if error.reason.isascii() and error.reason.isprintable() else "other"),
    ]
    if error.param is not None:
        metadata.append((PARAM_KEY, error.param.encode(errors="replace")[:_MAX_PARAM_BYTES]))
    if error.retry_after_s is not None:
        metadata.append((RETRY_AFTER_KEY, repr(float(error.retry_after_s))))
    details = error.message.encode(errors="replace")[:_MAX_MESSAGE_BYTES].decode(errors="ignore")
    if seal is not None:
        metadata.append((SEAL_KEY, seal.of_status(error.grpc_status, details, metadata)))
    return grpc.StatusCode[error.grpc_status], details, tuple(metadata)


def from_status(
    code: grpc.StatusCode,
    details: str,
    metadata: Iterable[tuple[str, str | bytes]],
    *,
    peer: str,
    seal: Seal,
) -> KvferryError:
    """Return the error of a status, not raised; `WorkerUnavailable` ("damaged") if its seal is wrong.

    Args:
        metadata: trailing metadata; if it names no class, gRPC itself made the status.
        peer: the worker's address, for messages.
        seal: of the call, not used yet.
    """
    fields = {str(key): value for key, value in metadata}
    said = [(key, fields[key]) for key in _SEALED_KEYS if key in fields]
    if said and fields.get(SEAL_KEY) != seal.of_status(code.name, details, said):
        return WorkerUnavailable(f"{peer} ended a call with a damaged status", reason="damaged")
    known = _CLASSES.get(_text(fields.get(CLASS_KEY)))
    if known is None:
        return _BY_STATUS.get(code, WorkerUnavailable)(f"{peer} answered {code.name}: {details}")
    return known(
        details,
        param=_text(fields[PARAM_KEY]) if PARAM_KEY in fields else None,
        reason=_text(fields.get(REASON_KEY)),
        retry_after_s=_seconds(_text(fields.get(RETRY_AFTER_KEY))),
    )


def _text(value: str | bytes | None) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""


def _seconds(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
