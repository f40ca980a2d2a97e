"""The gRPC server of a worker's control interface, with health and reflection.

Place in the request's path: the router's call arrives here and becomes a call of the service. Maps errors,
deadlines and cancellation; knows nothing of what the service does.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing, nullcontext
from typing import Any, TypeVar, cast

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvferry.shared.control import codec
from kvferry.shared.control.codec import Codec
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

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Context = grpc.aio.ServicerContext[bytes, bytes]

_log = structlog.get_logger(__name__)


class ControlServer:
    """A serving control server. Made by `serve_control`.

    serving (health SERVING) ──close──► NOT_SERVING, no new calls ──grace_s or all done──► calls cancelled
    """

    def __init__(self, server: grpc.aio.Server, status: Any, address: str) -> None:
        self._server = server
        self._status = status
        self.address = address

    async def close(self, grace_s: float) -> None:
        """Take no new calls, let those under way finish for at most `grace_s` seconds, cancel the rest."""
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
    methods: dict[str, dict[str, grpc.RpcMethodHandler[bytes, bytes]]] = {}
    if prefill is not None:
        methods[codec.PREFILL_SERVICE] = _prefill_methods(prefill)
    if decode is not None:
        methods[codec.DECODE_SERVICE] = _decode_methods(decode)
    status = cast(Any, health).aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    names = (*methods, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    for name, handlers in methods.items():
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise ConfigurationError(f"cannot listen for control calls at {listen!r}: {error}") from error
    await server.start()
    for name in ("", *methods):
        await status.set(name, health_pb2.HealthCheckResponse.SERVING)
    return ControlServer(server, status, f"{listen.rpartition(':')[0]}:{port}")


def _decode_methods(service: DecodeControl) -> dict[str, grpc.RpcMethodHandler[bytes, bytes]]:
    return {
        "Generate": _streaming(
            "Decode/Generate", service.generate, codec.GENERATE_REQUEST, codec.GENERATE_EVENT
        ),
        "Finish": _unary(service.finish, codec.FINISH_REQUEST, codec.FINISH_RESPONSE),
        "DropSession": _unary(service.drop_session, codec.SESSION_KEY, codec.HISTORY_INFO),
        "Status": _unary(_without_request(service.status), codec.STATUS_REQUEST, codec.WORKER_STATUS),
    }


def _prefill_methods(service: PrefillControl) -> dict[str, grpc.RpcMethodHandler[bytes, bytes]]:
    return {
        "Prefill": _streaming("Prefill/Prefill", service.prefill, codec.PREFILL_REQUEST, codec.PREFILL_EVENT),
        "CommitTurn": _unary(service.commit_turn, codec.COMMIT_TURN_REQUEST, codec.HISTORY_INFO),
        "AbortTurn": _unary(service.abort_turn, codec.ABORT_TURN_REQUEST, codec.ABORT_TURN_RESPONSE),
        "SessionInfo": _unary(service.session_info, codec.SESSION_KEY, codec.HISTORY_INFO),
        "DropSession": _unary(service.drop_session, codec.SESSION_KEY, codec.HISTORY_INFO),
        "Status": _unary(_without_request(service.status), codec.STATUS_REQUEST, codec.WORKER_STATUS),
    }


def _without_request(call: Callable[..., Awaitable[_Response]]) -> Callable[..., Awaitable[_Response]]:
    async def with_request(request: None, *, timeout_s: float) -> _Response:
        return await call(timeout_s=timeout_s)

    return with_request


def _streaming(
    name: str,
    call: Callable[..., AsyncGenerator[_Response, None]],
    request: Codec[_Request],
    response: Codec[_Response],
) -> grpc.RpcMethodHandler[bytes, bytes]:
    """A handler that writes, rather than yields: cancellation then always strikes inside it, and the
    service's generator is closed at once."""

    async def handle(data: bytes, context: _Context) -> None:
        async def work() -> None:
            with _span(name, context):
                stream = call(request.decode(data), timeout_s=_timeout_s(context))
                async with aclosing(stream):
                    async for event in stream:
                        await context.write(response.encode(event))

        await _guarded(work, context)

    return grpc.unary_stream_rpc_method_handler(handle)


def _unary(
    call: Callable[..., Awaitable[_Response]], request: Codec[_Request], response: Codec[_Response]
) -> grpc.RpcMethodHandler[bytes, bytes]:
    async def handle(data: bytes, context: _Context) -> bytes:
        async def work() -> bytes:
            return response.encode(await call(request.decode(data), timeout_s=_timeout_s(context)))

        return await _guarded(work, context)

    return grpc.unary_unary_rpc_method_handler(handle)


async def _guarded(work: Callable[[], Awaitable[_Response]], context: _Context) -> _Response:
    """Run a call with its request id bound; errors become statuses, unexpected ones are logged once."""
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
    """A span of a call that belongs to a trace."""
    metadata: Any = context.invocation_metadata() or ()
    parent = context_of({key: value for key, value in metadata if isinstance(value, str)})
    return nullcontext() if parent is None else entry(name, parent)


def _timeout_s(context: _Context) -> float:
    remaining_s = context.time_remaining()
    return DEFAULT_TIMEOUT_S if remaining_s is None else max(remaining_s, 0.0)


def _request_id(context: _Context) -> str:
    metadata: Any = context.invocation_metadata() or ()
    return next((str(value) for key, value in metadata if key == REQUEST_ID_KEY), "")
