"""gRPC clients that implement the two control interfaces.

The router calls them; `server.py` of a worker answers. They turn gRPC statuses back into errors; they do not
retry, choose workers or change deadlines.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar, cast

import grpc

from kvferry.shared.control.codec import DECODE, PREFILL, Method, Service
from kvferry.shared.control.event_streams import EVENTS_KEY, Ended, Item, SharedEvents
from kvferry.shared.control.messages import (
    CommitTurnRequest,
    EventsOfCalls,
    GenerateEvent,
    GenerateRequest,
    HistoryInfo,
    PrefillEvent,
    PrefillRequest,
    PrefixRequest,
    RedirectRequest,
    SessionKey,
    TransferAccepted,
    WorkerStatus,
)
from kvferry.shared.control.seal import SEALED_KEY, Seal, new_call_id
from kvferry.shared.control.server import MAX_MESSAGE_BYTES, MESSAGE_LIMITS, REQUEST_ID_KEY, ROUTER_KEY
from kvferry.shared.control.status import from_status
from kvferry.shared.errors import InvalidRequest, KvferryError, PayloadTooLarge, WorkerUnavailable
from kvferry.shared.process.silence import SilenceTimer
from kvferry.shared.telemetry.tracing import carrier
from kvferry.shared.trust.certs import Certs, Role, tls_name

_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    # Not `grpc.keepalive_timeout_ms`, which has no effect: gRPC waits this long for the answer to any ping.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    *MESSAGE_LIMITS,
)

IDLE_LIMIT_S = 10.0
"""A worker sends something in each stream at least every two seconds."""
_LATE_S = 1.0
"""How long after its deadline a call is given up; gRPC should have ended it at the deadline."""

_EOF: Any = cast(Any, grpc.aio).EOF
_Value = TypeVar("_Value")
_Answer = Coroutine[Any, Any, _Value]


class _Client:
    """One channel to one worker's service, and the calls that both services have."""

    _service: Service
    _role: Role

    def __init__(self, address: str, *, certs: Certs | None = None, router: str = "") -> None:
        """Create it in the event loop that uses it; `address` is host:port or any gRPC target. It connects on
        the first call.

        Args:
            certs: the router's; None: without TLS.
            router: its name, the same in all of its calls and no other router's.
        """
        self._address = address
        self._router = router
        self.heard_s = 0.0
        """When a stream last brought a message, on the event loop's clock."""
        if certs is None:
            self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        else:
            named = ("grpc.ssl_target_name_override", tls_name(self._role))
            self._channel = grpc.aio.secure_channel(
                address, certs.channel_credentials(), options=(*_OPTIONS, named)
            )

    async def close(self) -> None:
        """Cancel the calls in flight and close the connection. Idempotent."""
        await self._channel.close(None)

    def drop_session(self, session: SessionKey, *, timeout_s: float) -> _Answer[HistoryInfo]:
        return self._unary("DropSession", session, timeout_s)

    def status(self, *, timeout_s: float) -> _Answer[WorkerStatus]:
        return self._unary("Status", None, timeout_s)

    async def _unary(self, name: str, request: Any, timeout_s: float, request_id: str = "") -> Any:
        method = self._service.methods[name]
        start, call_id = self._channel.unary_unary(method.path, None, None), new_call_id()
        async with self._call(start, method, request, timeout_s, request_id, call_id) as call:
            answer = await _answer_of(call, timeout_s, self._address)
            return method.response.decode(Seal(method.path, call_id).open(answer))

    async def _stream(
        self,
        name: str,
        request: Any,
        timeout_s: float | None,
        request_id: str = "",
        *,
        call_id: str = "",
        events_id: str = "",
        answered: dict[str, str | bytes] | None = None,
    ) -> AsyncGenerator[Any, None]:
        """Yield the messages of a call.

        Args:
            call_id: "": a new one.
            events_id: of the stream that may carry the call's events, "" for none.
            answered: gets the answer's metadata before the first message is yielded.
        """
        method = self._service.methods[name]
        start, call_id = self._channel.unary_stream(method.path, None, None), call_id or new_call_id()
        decode, seal = method.response.decode, Seal(method.path, call_id)
        async with self._call(start, method, request, timeout_s, request_id, call_id, events_id) as call:
            silent, loop = asyncio.Event(), asyncio.get_running_loop()

            def give_up() -> None:
                silent.set()
                call.cancel()

            with SilenceTimer(IDLE_LIMIT_S, give_up) as timer:
                try:
                    while True:
                        timer.begin()
                        data = await call.read()
                        timer.end()
                        self.heard_s = loop.time()
                        if data is _EOF:
                            return
                        if message := seal.open(data):  # an empty message is a keepalive
                            if answered is not None:
                                answered.update(await call.initial_metadata())
                                answered = None
                            yield decode(message)
                except (asyncio.CancelledError, grpc.aio.AioRpcError):
                    if not silent.is_set() or _is_cancelled():
                        raise
                    raise WorkerUnavailable(
                        f"{self._address} was silent in a stream for {IDLE_LIMIT_S} s", reason="silent"
                    ) from None

    @asynccontextmanager
    async def _call(
        self,
        start: Callable[..., Any],
        method: Method,
        request: Any,
        timeout_s: float | None,
        request_id: str,
        call_id: str,
        events_id: str = "",
    ) -> AsyncGenerator[Any, None]:
        """Make a call that is cancelled on leaving, and whose failures are raised as our errors."""
        message = Seal(method.path, call_id).close(method.request.encode(request))
        if len(message) > MAX_MESSAGE_BYTES:
            raise PayloadTooLarge(
                f"the request is {len(message)} bytes for a worker; it may be {MAX_MESSAGE_BYTES}"
            )
        try:
            metadata = ((ROUTER_KEY, self._router), *_metadata(request_id, call_id, events_id))
            call = start(message, timeout=timeout_s, metadata=metadata)
        except grpc.aio.UsageError:
            raise WorkerUnavailable(
                f"the connection to {self._address} was closed", reason="closed"
            ) from None

        def ended(code: Any, details: str | None, trailing: Any) -> KvferryError:
            seal = Seal(method.path, call_id)
            return from_status(code, details or "", trailing or (), peer=self._address, seal=seal)

        try:
            yield call
        except InvalidRequest as error:
            raise WorkerUnavailable(
                f"{self._address} sent an answer that cannot be decoded: {error.message}", reason="bad_answer"
            ) from error
        except grpc.aio.AioRpcError as error:
            raise ended(error.code(), error.details(), error.trailing_metadata()) from error
        except asyncio.CancelledError:
            # grpc.aio also raises this where the worker answers CANCELLED and our task was not cancelled.
            if not call.done() or _is_cancelled():
                raise
            code, details = await call.code(), await call.details()
            raise ended(code, details, await call.trailing_metadata()) from None
        finally:
            call.cancel()


class GrpcDecodeClient(_Client):
    """Implements `DecodeControl` over gRPC."""

    _service = DECODE
    _role = "decode"

    def __init__(self, address: str, **options: Any) -> None:
        super().__init__(address, **options)
        self._events = SharedEvents(self._shared_events)

    async def close(self) -> None:
        await self._events.close()
        await super().close()

    async def generate(
        self, request: GenerateRequest, *, timeout_s: float
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Yield the events; those after TransferAccepted may come by the stream that calls share."""
        events, call_id, answered = self._events, new_call_id(), dict[str, str | bytes]()
        events.begin()
        own = self._stream(
            "Generate",
            request,
            timeout_s,
            request.request_id,
            call_id=call_id,
            events_id=events.stream_id,
            answered=answered,
        )
        with events.queue(call_id) as queue:
            async with aclosing(own):
                async for event in own:
                    yield event
                    if EVENTS_KEY in answered and isinstance(event, TransferAccepted):
                        break
                else:
                    return
                async with aclosing(_rest(own, queue, self._address)) as rest:
                    async for event in rest:
                        yield event

    def _shared_events(self, stream_id: str) -> AsyncGenerator[EventsOfCalls, None]:
        return self._stream("Events", stream_id, None)

    def finish(self, request_id: str, *, timeout_s: float) -> _Answer[None]:
        return self._unary("Finish", request_id, timeout_s, request_id)


class GrpcPrefillClient(_Client):
    """Implements `PrefillControl` over gRPC."""

    _service = PREFILL
    _role = "prefill"

    def prefill(self, request: PrefillRequest, *, timeout_s: float) -> AsyncGenerator[PrefillEvent, None]:
        return self._stream("Prefill", request, timeout_s, request.request_id)

    def redirect(self, request: RedirectRequest, *, timeout_s: float) -> _Answer[None]:
        return self._unary("Redirect", request, timeout_s, request.request_id)

    def commit_turn(self, request: CommitTurnRequest, *, timeout_s: float) -> _Answer[HistoryInfo]:
        return self._unary("CommitTurn", request, timeout_s, request.request_id)

    def abort_turn(self, request_id: str, *, timeout_s: float) -> _Answer[None]:
        return self._unary("AbortTurn", request_id, timeout_s, request_id)

    def session_info(self, session: SessionKey, *, timeout_s: float) -> _Answer[HistoryInfo]:
        return self._unary("SessionInfo", session, timeout_s)

    def prefix_info(self, request: PrefixRequest, *, timeout_s: float) -> _Answer[HistoryInfo]:
        return self._unary("PrefixInfo", request, timeout_s)


def _is_cancelled() -> bool:
    """Return whether our task was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _rest(
    own: AsyncGenerator[GenerateEvent, None], queue: asyncio.Queue[Item], address: str
) -> AsyncGenerator[GenerateEvent, None]:
    """Yield the events of the shared stream. The call's own stream shows whether it fails, and ends."""
    end = asyncio.create_task(anext(own, None))
    end.add_done_callback(lambda _: queue.put_nowait(None))
    late: asyncio.TimerHandle | None = None
    try:
        while not isinstance(item := await queue.get(), Ended):
            if isinstance(item, KvferryError):
                raise item
            if item is not None:
                yield item
            elif end.result() is not None:
                raise WorkerUnavailable(f"{address} sent an event by the wrong stream", reason="bad_answer")
            else:  # it ended as it should; the last events are on their way
                silent = WorkerUnavailable(f"{address} did not send a call's last events", reason="silent")
                late = asyncio.get_running_loop().call_later(IDLE_LIMIT_S, queue.put_nowait, silent)
    finally:
        if late is not None:
            late.cancel()
        end.cancel()
        await asyncio.wait((end,))


async def _answer_of(call: Any, timeout_s: float, address: str) -> bytes:
    """Return a unary call's answer in bounded time, even if gRPC neither ends the call at its deadline nor
    lets its waiter be cancelled: under faults its timers have stood still for minutes.

    Raises: WorkerUnavailable, or what the call raises.
    """
    answer: asyncio.Future[bytes] = asyncio.ensure_future(call)
    answer.add_done_callback(
        lambda done: done.cancelled() or done.exception()
    )  # nobody may be waiting by then
    await asyncio.wait((answer,), timeout=timeout_s + _LATE_S)
    if not answer.done():
        raise WorkerUnavailable(f"{address} did not answer a call within {timeout_s:g} s", reason="silent")
    return answer.result()


def _metadata(request_id: str, call_id: str, events_id: str) -> tuple[tuple[str, str], ...]:
    sendable = request_id.isascii() and request_id.isprintable()
    named = ((REQUEST_ID_KEY, request_id),) if request_id and sendable else ()
    shared = ((EVENTS_KEY, events_id),) if events_id else ()
    return (*named, (SEALED_KEY, call_id), *shared, *carrier().items())
