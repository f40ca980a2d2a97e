"""Middleware around every request: its id, its log line, the limits on what a client may send, and its
errors.

    BoundedH11Protocol (head) ─► RequestMiddleware (path, method, id, log, errors)
    ─► LimitsMiddleware (sizes) ─► routes

Everything inside may raise errors of `shared.errors`; only here do they become HTTP answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import h11
import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvferry.services.router.config import RouterConfig
from kvferry.services.router.http.access import KeyLimits
from kvferry.services.router.http.body import Authenticator
from kvferry.services.router.http.errors import UNKNOWN_FIELD, error_response, internal_error
from kvferry.shared.errors import (
    AuthenticationFailed,
    Cancelled,
    CapacityExceeded,
    HeadersTooLarge,
    InvalidRequest,
    KvferryError,
    Overloaded,
    PayloadTooLarge,
    PermissionDenied,
    RequestTimeout,
)
from kvferry.shared.process.draining import Drain
from kvferry.shared.process.freeing_rate import FreeingRate
from kvferry.shared.telemetry.metrics import RouterMetrics
from kvferry.shared.telemetry.tracing import context_of, entry, fail

_log = structlog.get_logger(__name__)
_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_NOT_IN_NAMES = re.compile(r"[^!-+\--~]")
_MAX_NAMES, _MAX_NAME = 64, 128
_CLIENT_LEFT = 499
_LINGER_S = 1.0
_QUEUE_FULL = "queue_full"
REFUSED_S = 0.05
"""Much less than the second that a refused client is told to wait at least."""
# Machines poll these every few seconds; a line for each would bury the rest.
_QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})
# A body over the limit is read on for a while, so that the client has sent it and reads the answer rather
# than a reset connection.
_DRAIN_BYTES = 64 << 20
MAX_HELD_BYTES = 256 << 20
"""Of the bodies of one caller's running requests together."""


@dataclass
class RequestRecord:
    """What the log line will say of a request; handlers add to `fields`.

    Attributes:
        arrival_s: on the clock of `time.perf_counter`.
        send: the server's own, for what follows an answer's head.
        ignored: names of the request's fields that change nothing here; they are in the answer's head.
        error: what ended the request, where an answer had begun already or the client had left.
    """

    request_id: str
    arrival_s: float
    metrics: RouterMetrics
    send: Send
    fields: dict[str, Any] = field(default_factory=dict)
    ignored: set[str] = field(default_factory=set)
    error: KvferryError | None = None
    status: int = 0

    def fail(self, error: KvferryError) -> None:
        """Note what ended the request. Counted before the client is told, so that counters never lag."""
        self.error = error
        self.metrics.request_failure.labels(category=error.category).inc()
        if isinstance(error, AuthenticationFailed | PermissionDenied) or error.reason.startswith("key_"):
            key = self.fields.get("key", "")
            self.metrics.access_denied.labels(reason=error.reason, key=key).inc()


@dataclass(eq=False)
class RequestMiddleware:
    """The outermost layer. The record is at `scope["state"]["record"]`.

    Takes doubled slashes, and one at the end, out of paths: clients put a base URL before them. Answers HEAD
    as GET, whose body the server leaves out, and OPTIONS with nothing, which allows a browser nothing. Paths
    of DELETE stay: what an empty name would delete is not what was meant. Once the router drains, requests
    are refused here.
    """

    app: ASGIApp
    metrics: RouterMetrics
    drain: Drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "OPTIONS":
            await Response(status_code=204)(scope, receive, send)
            return
        if scope["method"] != "DELETE":
            path = re.sub("/{2,}", "/", scope["path"]).rstrip("/") or "/"
            scope = {**scope, "path": path, "method": "GET" if scope["method"] == "HEAD" else scope["method"]}
        asked = Headers(scope=scope)
        given = asked.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        record = RequestRecord(request_id, time.perf_counter(), self.metrics, send)
        scope.setdefault("state", {})["record"] = record

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = record.request_id
                if record.ignored:
                    headers["x-ignored-fields"] = _listed(record.ignored)
                if self.drain.has_begun:
                    headers["connection"] = "close"
                record.status = message["status"]
            await send(message)

        counts = scope["path"] not in _QUIET_PATHS
        self.drain.num_running += counts
        with contextlib.ExitStack() as stack:
            if scope["method"] == "POST":
                span = entry(f"POST {scope['path']}", context_of(asked), request_id=request_id)
                stack.enter_context(span)
            try:
                if self.drain.has_begun and counts:
                    raise self.drain.refusal()
                await self.app(scope, receive, send_with_id)
            except Exception as failure:
                error = failure if isinstance(failure, KvferryError) else internal_error()
                if error is not failure:
                    _log.exception("request failed unexpectedly", request_id=request_id)
                record.fail(error)
                if record.status == 0 and not isinstance(error, Cancelled):
                    await error_response(error, scope["path"])(scope, receive, send_with_id)
            finally:
                self.drain.num_running -= counts
                _log_request(scope, record)
                if record.error is not None:
                    fail(record.error)
                    # Its frames refer to the error and to the request, which would stay until collected.
                    record.error.__traceback__ = None


def _listed(names: set[str]) -> str:
    """Return names that clients may have made up, in a form that is valid in a header."""
    shown = [_NOT_IN_NAMES.sub("?", name)[:_MAX_NAME] for name in sorted(names)[:_MAX_NAMES]]
    return ", ".join([*shown, *(["..."] if len(names) > _MAX_NAMES else [])])


def _log_request(scope: Scope, record: RequestRecord) -> None:
    error, elapsed_s = record.error, time.perf_counter() - record.arrival_s
    if error is not None:
        # Only a field's first name, because the names below it may be the client's.
        param = "" if error.reason == UNKNOWN_FIELD else error.param or ""
        record.fields |= {"reason": error.reason, "param": re.split(r"[.\[]", param)[0] or None}
        # The message of a refused field quotes its value, which may be a prompt's text.
        if not isinstance(error, InvalidRequest):
            record.fields["error"] = error.message
    elif scope["path"] in _QUIET_PATHS:
        return
    _log.info(
        "request",
        request_id=record.request_id,
        method=scope["method"],
        path=scope["path"],
        status=_CLIENT_LEFT if isinstance(error, Cancelled) else record.status,
        outcome="ok" if error is None else error.category,
        elapsed_ms=round(elapsed_s * 1000, 3),
        **record.fields,
    )


@dataclass(eq=False)
class LimitsMiddleware:
    """Reads the whole body of a POST before the application gets the request, so that handlers never wait for
    a client. The key is checked before: `scope["state"]["owner"]` is the caller of a POST. Nobody reads the
    body of another request: its key is checked later, and what is kept must be a caller's.

    Attributes: limits: of keys; None where there are none.

    Raises: HeadersTooLarge, PayloadTooLarge, RequestTimeout; what `auth` raises; Cancelled: the client left;
        CapacityExceeded: a queue has just refused the caller, or its running requests have too many bytes.
    """

    app: ASGIApp
    config: RouterConfig
    auth: Authenticator
    limits: KeyLimits | None

    def __post_init__(self) -> None:
        self._refusals = RecentRefusals()
        self._held_bytes = Counter[str]()
        """Of each caller's bodies, from their first byte to the end of the answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._check_head(scope)
        headers = Headers(scope=scope)
        self.auth.check_host(headers)
        if scope["method"] != "GET":
            self.auth.check_origin(headers)
        if scope["method"] != "POST":
            await self.app(scope, _with_body(b"", receive), send)
            return
        owner = scope["state"]["owner"] = self.auth.owner(headers)
        if self.limits is None:
            await self._handle(scope, headers, receive, send)
            return
        scope["state"]["record"].fields["key"] = self.limits.name(owner)
        async with self.limits.admitted(owner):
            await self._handle(scope, headers, receive, send)

    async def _handle(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        state, owner = scope["state"], scope["state"]["owner"]
        state["held_bytes"] = 0
        try:
            try:
                async with asyncio.timeout(timeout_s := self.config.read_timeout_s):
                    body = await self._read_body(headers, receive, state)
            except TimeoutError:
                raise RequestTimeout(f"The body was not complete within {timeout_s:g} s") from None
            if self.limits is not None and body:
                await self.limits.count_bytes(owner, len(body))
            receive = _with_body(body, receive)
            del body  # otherwise it would stay until the answer has ended
            with self._refusals.around(owner, scope["path"]):
                await self.app(scope, receive, send)
        finally:
            self._held_bytes[owner] -= state["held_bytes"]
            if not self._held_bytes[owner]:
                del self._held_bytes[owner]

    def _check_head(self, scope: Scope) -> None:
        size_bytes = len(scope.get("raw_path", b"")) + len(scope["query_string"])
        for name, value in scope["headers"]:
            size_bytes += len(name) + len(value) + 4
        if size_bytes > (most := self.config.max_header_bytes):
            raise HeadersTooLarge(f"The request's head has {size_bytes} bytes; at most {most} are allowed")

    async def _read_body(self, headers: Headers, receive: Receive, state: dict[str, Any]) -> bytes:
        owner, most = state["owner"], self.config.max_body_bytes
        declared_bytes = int(headers.get("content-length", "0"))  # h11 has checked that it is a number
        asks_first = declared_bytes > most and headers.get("expect", "").lower() == "100-continue"
        chunks: list[bytes] = []
        size_bytes, goes_on = 0, not asks_first
        while goes_on:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Cancelled("The client left before its request was complete")
            chunk = message.get("body", b"")
            size_bytes += len(chunk)
            goes_on = message.get("more_body", False) and size_bytes <= most + _DRAIN_BYTES
            if size_bytes > most:
                chunks.clear()
                continue
            chunks.append(chunk)
            state["held_bytes"] += len(chunk)
            self._held_bytes[owner] += len(chunk)
            if self._held_bytes[owner] > MAX_HELD_BYTES:
                raise CapacityExceeded(
                    f"This key's running requests would have bodies of more than {MAX_HELD_BYTES} bytes "
                    "together; repeat the request when some have ended",
                    reason="held_bytes",
                    retry_after_s=1.0,
                )
        if size_bytes > most or asks_first:
            size_bytes = max(size_bytes, declared_bytes)
            raise PayloadTooLarge(f"The body has {size_bytes} bytes or more; at most {most} are allowed")
        return b"".join(chunks)


def _with_body(body: bytes, receive: Receive) -> Receive:
    """Return a `Receive` of the body, then of the disconnect; further parts of a body are dropped."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        if pending:
            return pending.pop()
        while (message := await receive())["type"] == "http.request":
            pass
        return message

    return replay


class RecentRefusals:
    """A queue that is full for a caller (it refuses the caller with most waiting first) is full for the
    caller's next requests, too. Asking it again would take the router, which others use, the time to read,
    tokenize and place each of them.

    Args: clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refused: OrderedDict[tuple[str, str], tuple[float, str, float | None]] = OrderedDict()
        """By caller and path, the latest at the end: until when, the message, and when to retry. Not the
        error, whose traceback refers to the request."""

    @contextlib.contextmanager
    def around(self, owner: str, path: str) -> Iterator[None]:
        """Enclose a request of the caller.

        Raises: CapacityExceeded as the last one, if a queue refused that within `REFUSED_S`.
        """
        key, now_s = (owner, path), self._clock()
        while self._refused and next(iter(self._refused.values()))[0] <= now_s:
            self._refused.popitem(last=False)
        if key in self._refused:
            _, message, retry_after_s = self._refused[key]
            raise CapacityExceeded(message, reason=_QUEUE_FULL, retry_after_s=retry_after_s)
        try:
            yield
        except CapacityExceeded as error:
            if error.reason == _QUEUE_FULL:
                self._refused[key] = self._clock() + REFUSED_S, error.message, error.retry_after_s
                self._refused.move_to_end(key)
            raise


class BoundedH11Protocol(H11Protocol):
    """One connection, with a deadline for a request's head, and one for clients that read nothing; uvicorn's
    own protocol has neither.

        accepted ──head timer──► request ──► response ──► idle (uvicorn's keep-alive timer)
                       ▲                                    │ first byte of the next head
                       └────────────────────────────────────┘

    While the client's receive window is full, a write timer runs as well; at its end the connection is reset.
    """

    read_timeout_s: float
    write_timeout_s: float
    max_connections: int
    ended: FreeingRate
    """Connections of the server."""
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm_head_timer()
        if len(self.connections) > self.max_connections:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self.resume_writing()
        if not self._refused:
            self.ended.add(1)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.our_state is h11.IDLE:
            # An idle connection would have its last request in memory.
            self.cycle = self.scope = self.headers = None  # type: ignore[assignment]
        self._watch_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer input that h11 cannot parse. Called by uvicorn."""
        limit_bytes = self.config.h11_max_incomplete_event_size or 0
        if len(self.conn.trailing_data[0]) > limit_bytes:
            self._refuse(HeadersTooLarge(f"The request's head is larger than {limit_bytes} bytes"))
        else:
            self._refuse(InvalidRequest("What was sent is not a valid HTTP/1.1 request"))

    def _refuse(self, error: KvferryError) -> None:
        """Answer input that never became a request, and close."""
        if self.conn.our_state is not h11.IDLE or self.transport.is_closing():
            self.transport.close()
            return
        answer = error_response(error, path="")
        answer.headers["connection"] = "close"
        head = h11.Response(status_code=answer.status_code, headers=answer.raw_headers, reason=b"")
        for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        # Closing with unread bytes resets the connection, and the client might never see the answer: stop
        # writing, and read on for a moment.
        self._refused = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)

    def _make_room(self) -> None:
        """Close a connection that has no request, or this one if every other has one."""
        for other in self.connections - {self}:
            assert isinstance(other, BoundedH11Protocol), "the server makes no others"
            has_request = other.cycle is not None and not other.cycle.response_complete
            if not (has_request or other.transport.is_closing()):
                other.transport.close()
                return
        message = f"There are {self.max_connections} connections, which is the limit"
        self._refuse(Overloaded(message, reason="connections", retry_after_s=self.ended.wait_s(1)))

    def _watch_head(self) -> None:
        """Have the timer run while the next head has begun and is not complete."""
        if self.conn.their_state is not h11.IDLE:
            self._stop_head_timer()
        elif self._head_timer is None and self.conn.trailing_data[0]:
            self._arm_head_timer()

    def _arm_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.read_timeout_s, self._head_timed_out)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_timed_out(self) -> None:
        self._head_timer = None
        if self.conn.trailing_data[0]:
            self._refuse(RequestTimeout(f"The request's head was not complete in {self.read_timeout_s:g} s"))
        else:
            self.transport.close()
