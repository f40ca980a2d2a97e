"""The gRPC server of a worker's control interface, with health and, if asked for, reflection.

The router's call arrives here and becomes a call of the service's method of the same name. Maps errors,
deadlines and cancellation.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, nullcontext
from functools import partial
from typing import Any, cast

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvferry.shared.control import codec
from kvferry.shared.control.calls import DecodeControl, PrefillControl
from kvferry.shared.control.codec import Method
from kvferry.shared.control.event_streams import EVENTS_KEY, EventStreams
from kvferry.shared.control.messages import TransferAccepted, calling_router
from kvferry.shared.control.seal import EARLIER_KEY, SEALED_KEY, Seal, is_sealed
from kvferry.shared.control.status import to_status
from kvferry.shared.errors import Cancelled, ConfigurationError, KvferryError
from kvferry.shared.process.logging import request_context
from kvferry.shared.process.serving import HANDSHAKE_S
from kvferry.shared.telemetry.tracing import context_of, entry
from kvferry.shared.trust.certs import Certs, tls_name

MAX_MESSAGE_BYTES = 16 << 20
"""Larger requests are refused."""
MESSAGE_LIMITS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
"""gRPC's options for this limit, of servers and of channels."""
DEFAULT_TIMEOUT_S = 3600.0
REQUEST_ID_KEY = "x-request-id"
ROUTER_KEY = "kvferry-router"
KEEPALIVE_S = 2.0
"""How long a stream may be silent."""
_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)

_Context = grpc.aio.ServicerContext[bytes, bytes]

_log = structlog.get_logger(__name__)


class ControlServer:
    """A running control server, made by `serve_control`.

    serving (health SERVING) ──announce_end──► NOT_SERVING ──close──► no new calls ──grace_s or all done──►
    calls cancelled
    """

    def __init__(self, server: grpc.aio.Server, status: Any, streams: EventStreams, address: str) -> None:
        self._server = server
        self._status = status
        self._streams = streams
        self.address = address

    async def announce_end(self) -> None:
        """Say in health checks that the worker is to end. Calls are still answered."""
        await self._status.enter_graceful_shutdown()
        self._streams.end()

    async def close(self, grace_s: float) -> None:
        """Refuse new calls, wait at most `grace_s` seconds for those in flight, cancel the rest."""
        await self.announce_end()
        await self._server.stop(grace_s)


async def serve_control(
    *,
    listen: str,
    prefill: PrefillControl | None = None,
    decode: DecodeControl | None = None,
    certs: Certs | None = None,
    with_reflection: bool = False,
) -> ControlServer:
    """Serve one or both control interfaces.

    Args:
        listen: host:port; port 0 picks a free one.
        certs: the worker's; only the router may then call. None: without TLS.
        with_reflection: describe the services to any client that may connect.

    Raises:
        ConfigurationError: the address cannot be bound.
    """
    handshake = ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000))  # until the client's settings
    server = grpc.aio.server(options=(*_OPTIONS, handshake, *MESSAGE_LIMITS))
    names, streams = [], EventStreams()
    for service, implementation in ((codec.PREFILL, prefill), (codec.DECODE, decode)):
        if implementation is not None:
            names.append(service.name)
            handlers = {}
            for method_name, method in service.methods.items():
                snake_case = re.sub(r"(?<!^)(?=[A-Z])", "_", method_name).lower()
                call = streams.events if method_name == "Events" else getattr(implementation, snake_case)
                handlers[method_name] = _handler(method, call, tls_name("router") if certs else "", streams)
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.name, handlers),))
    status = cast(Any, health).aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    if with_reflection:
        reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        if certs is None:
            port = server.add_insecure_port(listen)
        else:
            port = server.add_secure_port(listen, certs.server_credentials())
    except RuntimeError as error:
        raise ConfigurationError(f"cannot listen for control calls at {listen!r}: {error}") from error
    await server.start()
    for name in ("", *names):
        await status.set(name, health_pb2.HealthCheckResponse.SERVING)
    return ControlServer(server, status, streams, f"{listen.rpartition(':')[0]}:{port}")


def _handler(
    method: Method, call: Callable[..., Any], caller: str, streams: EventStreams
) -> grpc.RpcMethodHandler[bytes, bytes]:
    """Return the handler of a method; `call` is the service's, without an argument for empty requests.

    Args:
        caller: the name that the client's certificate must have; "" without TLS.
        streams: those that calls may name.
    """
    span_name = method.path.rpartition(".")[2]

    async def handle(data: bytes, context: _Context) -> bytes | None:
        """Bind the request id for logs and call the service; errors become statuses.

        A stream is written here rather than yielded: cancellation is then always raised here, so the
        service's generator is closed at once.
        """
        if caller and caller.encode() not in context.auth_context().get("x509_common_name", ()):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "this role may not call a worker")
        metadata: Any = context.invocation_metadata() or ()
        headers = {key: value for key, value in metadata if isinstance(value, str)}
        remaining_s = context.time_remaining()
        timeout_s = DEFAULT_TIMEOUT_S if remaining_s is None else max(remaining_s, 0.0)
        request_id = headers.get(REQUEST_ID_KEY, "")
        new_seal = _seals(method, headers, data)
        seal = new_seal() if new_seal is not None else None
        calling_router.set(headers.get(ROUTER_KEY, ""))
        with request_context(request_id):
            try:
                if new_seal is not None:
                    data = new_seal().open(data)
                request = method.request.decode(data)
                answer = call(*(() if request is None else (request,)), timeout_s=timeout_s)
                if not method.streams:
                    message = method.response.encode(await answer)
                    return message if seal is None else seal.close(message)
                write_all = nullcontext(partial(_write, context)) if seal is None else _sealed(context, seal)
                stream = streams.find(headers.get(EVENTS_KEY, "")) if seal is not None else None
                if stream is not None:
                    await _sent(context.send_initial_metadata(((EVENTS_KEY, "shared"),)))
                parent = context_of(headers)
                span = nullcontext() if parent is None else entry(span_name, parent)
                with span, stream.of_call() if stream is not None else nullcontext():
                    async with aclosing(answer), write_all as write:
                        call_id, is_shared = headers.get(SEALED_KEY, ""), False
                        async for event in answer:
                            if is_shared and stream is not None:
                                stream.put(call_id, event)
                                continue
                            await write(method.response.encode(event))
                            is_shared = isinstance(event, TransferAccepted)
                        if stream is not None:
                            stream.end(call_id)
                return None
            except KvferryError as error:
                failure = error
            except Exception:
                _log.exception("control call failed")
                failure = KvferryError("the worker failed internally")
        await context.abort(*to_status(failure, new_seal() if new_seal is not None else None))
        raise AssertionError("abort returned")

    if method.streams:
        return grpc.unary_stream_rpc_method_handler(handle)
    return grpc.unary_unary_rpc_method_handler(handle)


def _seals(method: Method, headers: Mapping[str, str], data: bytes) -> Callable[[], Seal] | None:
    """Return a function that makes the seals of a call; None where the caller does not seal."""
    call_id = headers.get(SEALED_KEY)
    if call_id is None and EARLIER_KEY in headers:
        return partial(Seal.of_earlier, headers.get(REQUEST_ID_KEY, ""))
    if call_id is None and is_sealed(data):
        call_id = ""  # its metadata is damaged: the seal will not match
    return partial(Seal, method.path, call_id) if call_id is not None else None


async def _write(context: _Context, message: bytes) -> None:
    await _sent(context.write(message))


async def _sent(operation: Awaitable[None]) -> None:
    """Await a send. Raises: Cancelled where the caller has gone."""
    try:
        await operation
    except grpc.aio.InternalError:  # gRPC says only that it was not written
        raise Cancelled("The caller of a stream has gone") from None


@asynccontextmanager
async def _sealed(context: _Context, seal: Seal) -> AsyncIterator[Callable[[bytes], Awaitable[None]]]:
    """Yield a function that writes a stream's messages; write an empty one in each idle `KEEPALIVE_S`."""
    lock, num_written = asyncio.Lock(), 0

    async def write(message: bytes) -> None:
        nonlocal num_written
        async with lock:  # keeps the seals in order
            num_written += 1
            await _write(context, seal.close(message))

    async def keep_alive() -> None:
        while True:
            before = num_written
            await asyncio.sleep(KEEPALIVE_S)
            if num_written == before:
                await write(b"")

    keeping = asyncio.create_task(keep_alive())
    try:
        yield write
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
