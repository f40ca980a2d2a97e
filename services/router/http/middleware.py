"""Middleware around every request: its id, its log line, the limits on what a client may send, and its
errors.

    BoundedH11Protocol (head) ─► PlainRequestMiddleware (path, method) ─► RequestMiddleware (id, log, errors)
    ─► LimitsMiddleware (sizes) ─► routes

Everything inside may raise errors of `shared.errors`; only here do they become HTTP answers. uvicorn's own
protocol has no deadline for a request's head, and none for clients that read nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import re
import socket
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import h11
import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvferry.services.router.http.access import KeyLimits
from kvferry.services.router.http.errors import (
    UNKNOWN_FIELD,
    error_body,
    error_headers,
    error_response,
    internal_error,
)
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
from kvferry.shared.process.serving import parse_address
from kvferry.shared.telemetry.metrics import RouterMetrics
from kvferry.shared.telemetry.tracing import context_of, entry, fail

_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_NOT_IN_NAMES = re.compile(r"[^!-+\--~]")
_MAX_NAMES, _MAX_NAME = 64, 128
_AS_GET = {"HEAD": "GET"}
_CLIENT_LEFT = 499
_QUEUE_FULL = "queue_full"
REFUSED_S = 0.05
"""Much less than the second that a refused client is told to wait at least."""
_LINGER_S = 1.0
# Machines poll these every few seconds; a line for each would bury the rest.
_QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})
# A body over the limit is read on for a while, so that the client has sent it and reads the answer rather
# than a reset connection.
_DRAIN_BYTES = 64 << 20
MAX_HELD_BYTES = 256 << 20
"""Of the bodies of one caller's running requests together."""


class PlainRequestMiddleware:
    """Takes doubled slashes, and one at the end, out of paths: clients put a base URL before them. Answers
    HEAD as GET, whose body the server leaves out, and OPTIONS with nothing, which allows a browser nothing.

    Paths of DELETE stay: what an empty name would delete is not what was meant.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "OPTIONS":
            await Response(status_code=204)(scope, receive, send)
            return
        if scope["type"] == "http" and scope["method"] != "DELETE":
            path = re.sub("/{2,}", "/", scope["path"]).rstrip("/") or "/"
            scope = {**scope, "path": path, "method": _AS_GET.get(scope["method"], scope["method"])}
        await self._app(scope, receive, send)


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


class RequestMiddleware:
    """The outermost layer. The record is at `scope["state"]["record"]`.

    Once the router drains, requests are refused here.
    """

    def __init__(self, app: ASGIApp, *, metrics: RouterMetrics, drain: Drain) -> None:
        self._app = app
        self._metrics = metrics
        self._drain = drain
        self._log = structlog.get_logger(__name__)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(_request_id(Headers(scope=scope)), time.perf_counter(), self._metrics, send)
        scope.setdefault("state", {})["record"] = record

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = record.request_id
                if record.ignored:
                    headers["x-ignored-fields"] = _listed(record.ignored)
                if self._drain.has_begun:
                    headers["connection"] = "close"
                record.status = message["status"]
            await send(message)

        counts = scope["path"] not in _QUIET_PATHS
        self._drain.num_running += counts
        with contextlib.ExitStack() as stack:
            if scope["method"] == "POST":
                name, headers = f"POST {scope['path']}", Headers(scope=scope)
                stack.enter_context(entry(name, context_of(headers), request_id=record.request_id))
            try:
                if self._drain.has_begun and counts:
                    raise self._drain.refusal()
                await self._app(scope, receive, send_with_id)
            except KvferryError as error:
                await self._answer(error, record, scope, receive, send_with_id)
            except Exception:
                self._log.exception("request failed unexpectedly", request_id=record.request_id)
                await self._answer(internal_error(), record, scope, receive, send_with_id)
            finally:
                self._drain.num_running -= counts
                self._finish(scope, record, time.perf_counter() - record.arrival_s)
                if record.error is not None:
                    fail(record.error)
                    # Its frames refer to it, and to the request, which would stay until they are collected.
                    record.error.__traceback__ = None

    async def _answer(
        self, error: KvferryError, record: RequestRecord, scope: Scope, receive: Receive, send: Send
    ) -> None:
        record.fail(error)
        if record.status == 0 and not isinstance(error, Cancelled):
            await error_response(error, scope["path"])(scope, receive, send)

    def _finish(self, scope: Scope, record: RequestRecord, elapsed_s: float) -> None:
        error = record.error
        if error is not None:
            record.fields |= {"reason": error.reason, "param": _shown_param(error)}
            # The message of a refused field quotes its value, which may be a prompt's text.
            if not isinstance(error, InvalidRequest):
                record.fields["error"] = error.message
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


def _listed(names: set[str]) -> str:
    """Names that clients may have made up, as a header can have them."""
    shown = [_NOT_IN_NAMES.sub("?", name)[:_MAX_NAME] for name in sorted(names)[:_MAX_NAMES]]
    return ", ".join([*shown, *(["..."] if len(names) > _MAX_NAMES else [])])


def _shown_param(error: KvferryError) -> str | None:
    """The request's field for the log: its first name alone, because those below may be the client's."""
    if error.param is None or error.reason == UNKNOWN_FIELD:
        return None
    return re.split(r"[.\[]", error.param, maxsplit=1)[0]


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


class LimitsMiddleware:
    """Reads the whole body of a POST before the application gets the request, so that handlers never wait for
    a client. The key is checked before: `scope["state"]["owner"]` is the caller of a POST. Nobody reads the
    body of another request: its key is checked later, and what is kept must be a caller's.

    Args:
        owner: the caller by a request's headers; raises where they have no accepted key.
        limits: of keys; None where there are none.
        origins: of other sites, whose pages may use the API; "*" is any.
        check_host: raises where the request's host is not this server's.

    Raises: HeadersTooLarge, PayloadTooLarge, RequestTimeout, PermissionDenied; what `owner` raises; Cancelled
        where the client left; CapacityExceeded where a queue has just refused the caller, or its running
        requests have too many bytes.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        owner: Callable[[Headers], str],
        limits: KeyLimits | None,
        origins: Collection[str],
        check_host: Callable[[str], None],
        max_header_bytes: int,
        max_body_bytes: int,
        read_timeout_s: float,
    ) -> None:
        self._app = app
        self._check_host = check_host
        self._origins = origins
        self._owner = owner
        self._limits = limits
        self._refusals = RecentRefusals()
        self._held_bytes: Counter[str] = Counter()
        """Of each caller's bodies, from their first byte to the end of the answer."""
        self._max_header_bytes = max_header_bytes
        self._max_body_bytes = max_body_bytes
        self._read_timeout_s = read_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._check_head(scope)
        headers = Headers(scope=scope)
        self._check_host(headers.get("host", ""))
        if scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            _refuse_other_sites(headers, self._origins)
        if scope["method"] != "POST":
            await self._app(scope, _without_body(receive), send)
            return
        owner = scope["state"]["owner"] = self._owner(headers)
        if self._limits is None:
            await self._handle(scope, headers, receive, send)
            return
        scope["state"]["record"].fields["key"] = self._limits.name(owner)
        async with self._limits.admitted(owner):
            await self._handle(scope, headers, receive, send)

    async def _handle(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        state, owner = scope["state"], scope["state"]["owner"]
        state["held_bytes"] = 0
        try:
            try:
                async with asyncio.timeout(self._read_timeout_s):
                    body = await self._read_body(headers, receive, state)
            except TimeoutError:
                raise RequestTimeout(f"The body was not complete within {self._read_timeout_s:g} s") from None
            if self._limits is not None and body:
                await self._limits.count_bytes(owner, len(body))
            receive = _with_body(body, receive)
            del body  # else it would stay until the answer has ended
            with self._refusals.around(owner, scope["path"]):
                await self._app(scope, receive, send)
        finally:
            self._held_bytes[owner] -= state["held_bytes"]
            if not self._held_bytes[owner]:
                del self._held_bytes[owner]

    def _check_head(self, scope: Scope) -> None:
        size_bytes = len(scope.get("raw_path", b"")) + len(scope["query_string"])
        for name, value in scope["headers"]:
            size_bytes += len(name) + len(value) + 4
        if size_bytes > self._max_header_bytes:
            raise HeadersTooLarge(
                f"The request's head has {size_bytes} bytes; at most {self._max_header_bytes} are allowed"
            )

    async def _read_body(self, headers: Headers, receive: Receive, state: dict[str, Any]) -> bytes:
        owner = state["owner"]
        declared_bytes = _content_length(headers)
        if declared_bytes > self._max_body_bytes and headers.get("expect", "").lower() == "100-continue":
            raise self._too_large(declared_bytes)
        chunks: list[bytes] = []
        size_bytes = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Cancelled("The client left before its request was complete")
            chunk = message.get("body", b"")
            size_bytes += len(chunk)
            if size_bytes <= self._max_body_bytes:
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
            else:
                chunks.clear()
            if not message.get("more_body", False) or size_bytes > self._max_body_bytes + _DRAIN_BYTES:
                break
        if size_bytes > self._max_body_bytes:
            raise self._too_large(max(size_bytes, declared_bytes))
        return b"".join(chunks)

    def _too_large(self, size_bytes: int) -> PayloadTooLarge:
        return PayloadTooLarge(
            f"The body has {size_bytes} bytes or more; at most {self._max_body_bytes} are allowed"
        )


def _with_body(body: bytes, receive: Receive) -> Receive:
    """What comes after a body, and the body before it."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay


def _without_body(receive: Receive) -> Receive:
    """An empty body, and then the client's leaving; parts of a body that come are dropped."""
    pending: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

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
        """Around a request of the caller.

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


def _refuse_other_sites(headers: Headers, allowed: Collection[str]) -> None:
    """A page of another site can make a browser send a POST without asking this server first. Programs send
    neither header. Args: allowed: origins whose pages may."""
    if "*" in allowed or headers.get("origin") in allowed:
        return
    origin, site = headers.get("origin", ""), headers.get("sec-fetch-site", "")
    if site in ("cross-site", "same-site") or (origin and urlsplit(origin).netloc != headers.get("host", "")):
        raise PermissionDenied(f"The request comes from a page of another site: {(origin or site)[:200]}")


_PRIVATE = (".localhost", ".local", ".internal", ".lan", ".home.arpa", ".svc")
"""Ends of names that no public server resolves."""


class HostCheck:
    """Refuses requests by the host that they name, where no key is needed.

    A page elsewhere can have its own name point to an address of this machine or network (DNS rebinding). Its
    browser then takes this server for the page's own, and lets it read answers. It cannot have a name that
    only the network itself gives out, or an address, and not a certificate for this server.

    Args:
        needs_no_key: whether anyone may chat, at the moment.
        allowed: further names; "*" is any.
        listen: the address that the server was given.
    """

    def __init__(self, needs_no_key: Callable[[], bool], allowed: Collection[str], listen: str) -> None:
        self._needs_no_key = needs_no_key
        self._any = "*" in allowed
        host, _ = parse_address("listen", listen)
        self._allowed = {name.lower() for name in (*allowed, host, socket.gethostname())}

    def __call__(self, host: str) -> None:
        """Args: host: a request's, with or without a port; empty where it has none, as browsers' always have.

        Raises: PermissionDenied.
        """
        if self._any or not self._needs_no_key():
            return
        name = _name_of(host)
        if name in self._allowed or _is_local(name):
            return
        raise PermissionDenied(
            f"The request is for the host {name[:100]!r}. Without API keys this server answers only those "
            "for an address, a name of the local network, or one of --allowed-hosts",
            reason="host",
        )


def _name_of(host: str) -> str:
    """The host without its port, in lower case."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).strip("[]").rstrip(".").lower()


def _is_local(name: str) -> bool:
    if "." not in name and ":" not in name:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.endswith(_PRIVATE)
    return True


def _content_length(headers: Headers) -> int:
    value = headers.get("content-length", "0")
    if not (value.isascii() and value.isdigit()):
        raise InvalidRequest(f"Content-Length is {value[:40]!r}; it must be a number of bytes")
    return int(value)


class BoundedH11Protocol(H11Protocol):
    """One connection.

        accepted ──head timer──► request ──► response ──► idle (uvicorn's keep-alive timer)
                       ▲                                    │ first byte of the next head
                       └────────────────────────────────────┘

    While the client's receive window is full, a write timer runs as well; at its end the connection is reset.
    """

    read_timeout_s = 30.0
    write_timeout_s = 60.0
    max_connections = 1000
    ended = FreeingRate()
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
        if self.conn.their_state is not h11.IDLE:
            self._stop_head_timer()
        elif self._head_timer is None and self.conn.trailing_data[0]:
            self._arm_head_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.our_state is h11.IDLE:
            # An idle connection would have its last request in memory.
            self.cycle = self.scope = self.headers = None  # type: ignore[assignment]
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0] and self._head_timer is None:
            self._arm_head_timer()

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
        """uvicorn calls this where h11 cannot parse the input."""
        buffered_bytes = len(self.conn.trailing_data[0])
        limit_bytes = self.config.h11_max_incomplete_event_size or 0
        if limit_bytes and buffered_bytes > limit_bytes:
            self._refuse(HeadersTooLarge(f"The request's head is larger than {limit_bytes} bytes"))
        else:
            self._refuse(InvalidRequest("What was sent is not a valid HTTP/1.1 request"))

    def _refuse(self, error: KvferryError) -> None:
        """Answer input that never became a request, and close."""
        if self.conn.our_state is not h11.IDLE or self.transport.is_closing():
            self.transport.close()
            return
        body = json.dumps(error_body(error)).encode()
        given = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            **error_headers(error),
            "connection": "close",
        }
        headers = [(name.encode(), value.encode()) for name, value in given.items()]
        answer = h11.Response(status_code=error.http_status, headers=headers, reason=b"")
        for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        # Closing with unread bytes resets the connection, and the client might never see the answer: stop
        # writing, and read on for a moment.
        self._refused = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)

    def _make_room(self) -> None:
        """Close a connection that has no request, or this one where every other has one."""
        others = (its for its in self.connections if isinstance(its, BoundedH11Protocol) and its is not self)
        idle = next((its for its in others if its._is_idle), None)
        if idle is not None:
            idle.transport.close()
        else:
            message = f"There are {self.max_connections} connections, which is the limit"
            retry_after_s = self.ended.wait_s(1)
            self._refuse(Overloaded(message, reason="connections", retry_after_s=retry_after_s))

    @property
    def _is_idle(self) -> bool:
        has_request = self.cycle is not None and not self.cycle.response_complete
        return not has_request and not self.transport.is_closing()

    def _arm_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.read_timeout_s, self._head_timed_out)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_timed_out(self) -> None:
        self._head_timer = None
        if self.conn.their_state is not h11.IDLE:
            return
        if self.conn.trailing_data[0]:
            self._refuse(RequestTimeout(f"The request's head was not complete in {self.read_timeout_s:g} s"))
        else:
            self.transport.close()
