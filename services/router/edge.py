"""The outermost layer of a request: its id, its one log line, and the answer where anything below raised.

Everything else may raise errors of `shared.errors` freely; only here do they become HTTP.
"""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvferry.services.router.errors import error_response, internal_error
from kvferry.shared.errors import Cancelled, KvferryError
from kvferry.shared.metrics import RouterMetrics
from kvferry.shared.telemetry import context_of, entry, fail

_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_CLIENT_LEFT = 499
# Polled every few seconds by machines; a line each would bury the rest.
_QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})


@dataclass
class RequestRecord:
    """What the log line will say of a request; handlers add to `fields`.

    Attributes:
        arrival_s: on the clock of `time.perf_counter`.
        error: what ended the request, where an answer had begun already or the client had left.
    """

    request_id: str
    arrival_s: float
    metrics: RouterMetrics
    fields: dict[str, Any] = field(default_factory=dict)
    error: KvferryError | None = None
    status: int = 0

    def fail(self, error: KvferryError) -> None:
        """Note what ended the request; counted before the client is told, so that counters never lag."""
        self.error = error
        self.metrics.request_failure.labels(category=error.category).inc()


class RequestEdge:
    """Wraps the application. The record is at `scope["state"]["record"]`."""

    def __init__(self, app: ASGIApp, *, metrics: RouterMetrics) -> None:
        self._app = app
        self._metrics = metrics
        self._log = structlog.get_logger(__name__)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(_request_id(Headers(scope=scope)), time.perf_counter(), self._metrics)
        scope.setdefault("state", {})["record"] = record

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = record.request_id
                record.status = message["status"]
            await send(message)

        with contextlib.ExitStack() as stack:
            if scope["method"] == "POST":
                name, headers = f"POST {scope['path']}", Headers(scope=scope)
                stack.enter_context(entry(name, context_of(headers), request_id=record.request_id))
            try:
                await self._app(scope, receive, send_with_id)
            except KvferryError as error:
                await self._answer(error, record, scope, receive, send_with_id)
            except Exception:
                self._log.exception("request failed unexpectedly", request_id=record.request_id)
                await self._answer(internal_error(), record, scope, receive, send_with_id)
            finally:
                self._finish(scope, record, time.perf_counter() - record.arrival_s)
                if record.error is not None:
                    fail(record.error)

    async def _answer(
        self, error: KvferryError, record: RequestRecord, scope: Scope, receive: Receive, send: Send
    ) -> None:
        record.fail(error)
        if record.status == 0 and not isinstance(error, Cancelled):
            response: JSONResponse = error_response(error)
            await response(scope, receive, send)

    def _finish(self, scope: Scope, record: RequestRecord, elapsed_s: float) -> None:
        error = record.error
        if error is not None:
            record.fields |= {"error": error.message, "reason": error.reason, "param": error.param}
        client_left = isinstance(error, Cancelled)
        if scope["path"] in _QUIET_PATHS and error is None:
            return
        self._log.info(
            "request",
            request_id=record.request_id,
            method=scope["method"],
            path=scope["path"],
            status=_CLIENT_LEFT if client_left else record.status,
            outcome="ok" if error is None else error.category,
            elapsed_ms=round(elapsed_s * 1000, 3),
            **record.fields,
        )


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
