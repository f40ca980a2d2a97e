"""The error tree: everything that the project raises on purpose.

    KvferryError                       internal         500  INTERNAL             not retryable
    ├── InvalidRequest                 invalid_request  400  INVALID_ARGUMENT
    │   ├── ContextLengthExceeded      invalid_request  400  INVALID_ARGUMENT
    │   ├── MethodNotAllowed           invalid_request  405  INVALID_ARGUMENT
    │   ├── RequestTimeout             invalid_request  408  INVALID_ARGUMENT
    │   ├── PayloadTooLarge            invalid_request  413  INVALID_ARGUMENT
    │   └── HeadersTooLarge            invalid_request  431  INVALID_ARGUMENT
    ├── AuthenticationFailed           auth             401  UNAUTHENTICATED
    ├── PermissionDenied               auth             403  PERMISSION_DENIED
    ├── NotFound                       not_found        404  NOT_FOUND
    │   ├── ModelNotFound
    │   ├── SessionNotFound
    │   ├── ResponseNotFound
    │   └── DocumentNotFound
    ├── SessionBusy                    conflict         409  ABORTED              retryable
    ├── SessionNotStored               conflict         409  ABORTED
    ├── CapacityExceeded               rate_limit       429  RESOURCE_EXHAUSTED   retryable
    ├── Overloaded                     overloaded       503  UNAVAILABLE          retryable
    │   ├── WorkerUnavailable          worker_lost      503  UNAVAILABLE          retryable
    │   └── StoreUnavailable           store_lost       503  UNAVAILABLE          retryable
    ├── DeadlineExceeded               deadline         504  DEADLINE_EXCEEDED    retryable
    ├── Cancelled                      cancelled        499  CANCELLED
    ├── TransferFailed                 transfer         502  DATA_LOSS            retryable
    │   ├── ProtocolMismatch           transfer         502  FAILED_PRECONDITION
    │   │   └── MalformedMessage       transfer         502  DATA_LOSS            retryable
    │   └── LeaseExpired               transfer         502  ABORTED              retryable
    ├── HistoryMiss                    history          500  NOT_FOUND            retryable
    ├── UnsupportedModel               configuration    500  FAILED_PRECONDITION
    └── ConfigurationError             configuration    500  FAILED_PRECONDITION

`category` is a label of `request_failure_total`; `code` and `param` are fields of OpenAI errors; `reason` is
a label of more specific counters (admission_rejected_total, transfer_failed_total).
"""

from __future__ import annotations

from typing import ClassVar

OTHER_RELEASE = "other_release"
"""The reason of an error about a plan or a message with something that this release does not know, or without
what it needs: router and worker are of different releases."""


class KvferryError(Exception):
    """Base of every deliberate error.

    Args:
        message: names the parameter, its value and what is allowed.
        param: dotted name of the invalid request field, if there is one.
        reason: short label for a counter, `[a-z_]+`.
        retry_after_s: seconds after which a retry may succeed.
    """

    category: ClassVar[str] = "internal"
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False

    def __init__(
        self, message: str, *, param: str | None = None, reason: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.reason = reason or self.category
        self.retry_after_s = retry_after_s


class InvalidRequest(KvferryError):
    category = "invalid_request"
    type = "invalid_request_error"
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class MethodNotAllowed(InvalidRequest):
    http_status = 405


class RequestTimeout(InvalidRequest):
    """The client took too long to send a request's head or body."""

    http_status = 408


class PayloadTooLarge(InvalidRequest):
    http_status = 413


class HeadersTooLarge(InvalidRequest):
    http_status = 431


class AuthenticationFailed(KvferryError):
    category = "auth"
    type = "invalid_request_error"
    code = "invalid_api_key"
    http_status = 401
    grpc_status = "UNAUTHENTICATED"


class PermissionDenied(KvferryError):
    """The caller is known, or not asked for, and may not do this."""

    category = "auth"
    type = "invalid_request_error"
    code = "permission_denied"
    http_status = 403
    grpc_status = "PERMISSION_DENIED"


class NotFound(KvferryError):
    category = "not_found"
    type = "invalid_request_error"
    http_status = 404
    grpc_status = "NOT_FOUND"


class ModelNotFound(NotFound):
    code = "model_not_found"


class SessionNotFound(NotFound):
    code = "session_not_found"


class ResponseNotFound(NotFound):
    """The code is OpenAI's where a request continues the response; OpenAI has none for reading one."""

    code = "previous_response_not_found"


class DocumentNotFound(NotFound):
    code = "document_not_found"


class SessionBusy(KvferryError):
    category = "conflict"
    type = "invalid_request_error"
    code = "session_busy"
    http_status = 409
    grpc_status = "ABORTED"
    retryable = True


class SessionNotStored(KvferryError):
    """The session's last turn was answered and could not be stored, so another one cannot continue it."""

    category = "conflict"
    type = "invalid_request_error"
    code = "session_not_stored"
    http_status = 409
    grpc_status = "ABORTED"

    @classmethod
    def of(cls, session_id: str) -> SessionNotStored:
        return cls(
            f"The last turn of session {session_id!r} was not stored, as its answer said; send the whole "
            "conversation with session_mode 'replace'",
            reason="not_stored",
        )


class CapacityExceeded(KvferryError):
    """Refused for now: the arena or a queue is full."""

    category = "rate_limit"
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"
    retryable = True


class Overloaded(KvferryError):
    category = "overloaded"
    code = "overloaded"
    http_status = 503
    grpc_status = "UNAVAILABLE"
    retryable = True


class WorkerUnavailable(Overloaded):
    category = "worker_lost"

    @classmethod
    def draining(cls, role: str) -> WorkerUnavailable:
        return cls(f"the {role} worker is to end; another one runs the turn", reason="draining")


class StoreUnavailable(Overloaded):
    """Redis does not answer, or answers with an error."""

    category = "store_lost"


class DeadlineExceeded(KvferryError):
    category = "deadline"
    code = "deadline_exceeded"
    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"
    retryable = True


class Cancelled(KvferryError):
    category = "cancelled"
    code = "cancelled"
    http_status = 499
    grpc_status = "CANCELLED"


class TransferFailed(KvferryError):
    category = "transfer"
    code = "transfer_failed"
    http_status = 502
    grpc_status = "DATA_LOSS"
    retryable = True


class ProtocolMismatch(TransferFailed):
    """The peer has another protocol version or another model."""

    grpc_status = "FAILED_PRECONDITION"
    retryable = False


class MalformedMessage(ProtocolMismatch):
    """A message that the protocol does not allow: sent by something else, or spoilt on its way."""

    grpc_status = "DATA_LOSS"
    retryable = True


class LeaseExpired(TransferFailed):
    grpc_status = "ABORTED"


class HistoryMiss(KvferryError):
    """Stored history is missing; prefill can compute it again from the token ids."""

    category = "history"
    grpc_status = "NOT_FOUND"
    retryable = True


class UnsupportedModel(KvferryError):
    category = "configuration"
    grpc_status = "FAILED_PRECONDITION"


class ConfigurationError(KvferryError):
    category = "configuration"
    grpc_status = "FAILED_PRECONDITION"
