"""The gRPC server of a worker's control interface, with health and reflection.

The router's call arrives here and becomes a call of the service's method of the same name. Maps errors,
deadlines and cancellation.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, aclosing, nullcontext
from typing import Any, TypeVar, cast

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvferry.shared.control import codec
from kvferry.shared.control.codec import Method
from kvferry.shared.control.interfaces import DecodeControl, PrefillControl
from kvferry.shared.control.status import to_status
from kvferry.shared.errors import ConfigurationError, KvferryError
from kvferry.shared.logging import request_context
from kvferry.shared.telemetry import context_of, entry

DEFAULT_MAX_MESSAGE_BYTES = 16 << 20
DEFAULT_TIMEOUT_S = 3600.0
REQUEST_ID_KEY = "x-request-id"
_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)

_Response = TypeVar("_Response")
_Context = grpc.aio.ServicerContext[bytes, bytes]

_log = structlog.get_logger(__name__)


class ControlServer:
    """A running control server, made by `serve_control`.

    serving (health SERVING) ──close──► NOT_SERVING, no new calls ──grace_s or all done──► calls cancelled
    """

    def __init__(self, server: grpc.aio.Server, status: Any, address: str) -> None:
        self._server = server
        self._status = status
        self.address = address

    async def close(self, grace_s: float) -> None:
        """Refuse new calls, wait at most `grace_s` seconds for those in flight, cancel the rest."""
        await self._status.enter_graceful_shutdown()
        await self._server.stop(grace_s)


async def serve_control(
    *,
    listen: str,
    prefill: PrefillControl | None = None,
    decode: DecodeControl | None = None,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
) -> ControlServer:
    """Serve one or both control interfaces.

    Args:
        listen: host:port; port 0 picks a free one.
        max_message_bytes: larger requests are refused.

    Raises:
        ConfigurationError: the address cannot be bound.
    """
    options = (
        *_OPTIONS,
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
    )
    server = grpc.aio.server(options=options)
    names = []
    for service, implementation in ((codec.PREFILL, prefill), (codec.DECODE, decode)):
        if implementation is not None:
            names.append(service.name)
            handlers = {
                name: _handler(method, getattr(implementation, _snake_case(name)))
                for name, method in service.methods.items()
            }
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.name, handlers),))
    status = cast(Any, health).aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise ConfigurationError(f"cannot listen for control calls at {listen!r}: {error}") from error
    await server.start()
    for name in ("", *names):
        await status.set(name, health_pb2.HealthCheckResponse.SERVING)
    return ControlServer(server, status, f"{listen.rpartition(':')[0]}:{port}")


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _handler(method: Method, call: Callable[..., Any]) -> grpc.RpcMethodHandler[bytes, bytes]:
    """The handler of one method; `call` is the service's method, which takes no request if that is empty."""
    request, response = method.request, method.response
    span = method.path.rpartition(".")[2]

    def start(data: bytes, context: _Context) -> Any:
        value = request.decode(data)
        return call(*(() if value is None else (value,)), timeout_s=_timeout_s(context))

    async def unary(data: bytes, context: _Context) -> bytes:
        async def work() -> bytes:
            return response.encode(await start(data, context))

        return await _guarded(work, context)

    async def stream(data: bytes, context: _Context) -> None:
        """Writes, rather than yields: cancellation then always strikes in here, and the service's generator
        is closed at once."""

        async def work() -> None:
            with _span(span, context):
                async with aclosing(start(data, context)) as events:
                    async for event in events:
                        await context.write(response.encode(event))

        await _guarded(work, context)

    if method.streams:
        return grpc.unary_stream_rpc_method_handler(stream)
    return grpc.unary_unary_rpc_method_handler(unary)


async def _guarded(work: Callable[[], Awaitable[_Response]], context: _Context) -> _Response:
    """Run a call with its request id in the log context; errors become statuses, unexpected ones are
    logged."""
    with request_context(_request_id(context)):
        try:
            return await work()
        except KvferryError as error:
            failure = error
        except Exception:
            _log.exception("control call failed")
            failure = KvferryError("the worker failed internally")
    code, details, metadata = to_status(failure)
    await context.abort(code, details, metadata)
    raise AssertionError("abort returned")


def _span(name: str, context: _Context) -> AbstractContextManager[None]:
    """A tracing span, if the call belongs to a trace."""
    metadata: Any = context.invocation_metadata() or ()
    parent = context_of({key: value for key, value in metadata if isinstance(value, str)})
    return nullcontext() if parent is None else entry(name, parent)


def _timeout_s(context: _Context) -> float:
    remaining_s = context.time_remaining()
    return DEFAULT_TIMEOUT_S if remaining_s is None else max(remaining_s, 0.0)


def _request_id(context: _Context) -> str:
    metadata: Any = context.invocation_metadata() or ()
    return next((str(value) for key, value in metadata if key == REQUEST_ID_KEY), "")
