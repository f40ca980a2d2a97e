"""gRPC clients that implement the two control interfaces.

The router calls them; `server.py` of a worker answers. They turn gRPC statuses back into errors; they do not
retry, choose workers or change deadlines.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc

from kvferry.shared.control.codec import DECODE, PREFILL, Service
from kvferry.shared.control.messages import (
    CommitTurnRequest,
    GenerateEvent,
    GenerateRequest,
    HistoryInfo,
    PrefillEvent,
    PrefillRequest,
    SessionKey,
    WorkerStatus,
)
from kvferry.shared.control.server import DEFAULT_MAX_MESSAGE_BYTES, REQUEST_ID_KEY
from kvferry.shared.control.status import from_status
from kvferry.shared.errors import InvalidRequest, KvferryError, WorkerUnavailable
from kvferry.shared.telemetry import carrier

_OPTIONS = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
)


class _Client:
    """One channel to one worker's service, and the calls that both services have."""

    _service: Service

    def __init__(self, address: str, *, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES) -> None:
        """Create it in the event loop that uses it; it connects on the first call.

        Args:
            address: host:port, or any gRPC target.
        """
        self._address = address
        self._channel = grpc.aio.insecure_channel(
            address,
            options=(
                *_OPTIONS,
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", max_message_bytes),
            ),
        )

    async def close(self) -> None:
        """Cancel the calls in flight and close the connection. Idempotent."""
        await self._channel.close(None)

    async def drop_session(self, session: SessionKey, *, timeout_s: float) -> HistoryInfo:
        dropped: HistoryInfo = await self._unary("DropSession", session, timeout_s)
        return dropped

    async def status(self, *, timeout_s: float) -> WorkerStatus:
        status: WorkerStatus = await self._unary("Status", None, timeout_s)
        return status

    async def _unary(self, name: str, request: Any, timeout_s: float, request_id: str = "") -> Any:
        method = self._service.methods[name]
        call: Any = self._channel.unary_unary(method.path, None, None)(
            method.request.encode(request), timeout=timeout_s, metadata=_metadata(request_id)
        )
        try:
            data = await call
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from error
        except asyncio.CancelledError:
            await self._raise_if_peer_cancelled(call)
            raise
        try:
            return method.response.decode(data)
        except InvalidRequest as error:
            raise self._bad_answer(error) from error

    async def _stream(
        self, name: str, request: Any, timeout_s: float, request_id: str
    ) -> AsyncGenerator[Any, None]:
        method = self._service.methods[name]
        decode = method.response.decode
        call: Any = self._channel.unary_stream(method.path, None, None)(
            method.request.encode(request), timeout=timeout_s, metadata=_metadata(request_id)
        )
        try:
            async for data in call:
                yield decode(data)
        except InvalidRequest as error:
            raise self._bad_answer(error) from error
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from error
        except asyncio.CancelledError:
            await self._raise_if_peer_cancelled(call)
            raise
        finally:
            call.cancel()

    def _error(self, error: grpc.aio.AioRpcError) -> KvferryError:
        metadata: Any = error.trailing_metadata() or ()
        return from_status(error.code(), error.details() or "", metadata, peer=self._address)

    def _bad_answer(self, error: InvalidRequest) -> WorkerUnavailable:
        return WorkerUnavailable(
            f"{self._address} sent an answer that cannot be decoded: {error.message}", reason="bad_answer"
        )

    async def _raise_if_peer_cancelled(self, call: Any) -> None:
        """grpc.aio raises CancelledError also when the worker answers CANCELLED: raise that status's error,
        unless it is our own task that is being cancelled."""
        task = asyncio.current_task()
        if call.done() and (task is None or not task.cancelling()):
            metadata = await call.trailing_metadata() or ()
            raise from_status(
                await call.code(), await call.details() or "", metadata, peer=self._address
            ) from None


class GrpcDecodeClient(_Client):
    """Implements `DecodeControl` over gRPC."""

    _service = DECODE

    def generate(self, request: GenerateRequest, *, timeout_s: float) -> AsyncGenerator[GenerateEvent, None]:
        return self._stream("Generate", request, timeout_s, request.request_id)

    async def finish(self, request_id: str, *, timeout_s: float) -> None:
        await self._unary("Finish", request_id, timeout_s, request_id)


class GrpcPrefillClient(_Client):
    """Implements `PrefillControl` over gRPC."""

    _service = PREFILL

    def prefill(self, request: PrefillRequest, *, timeout_s: float) -> AsyncGenerator[PrefillEvent, None]:
        return self._stream("Prefill", request, timeout_s, request.request_id)

    async def commit_turn(self, request: CommitTurnRequest, *, timeout_s: float) -> HistoryInfo:
        committed: HistoryInfo = await self._unary("CommitTurn", request, timeout_s, request.request_id)
        return committed

    async def abort_turn(self, request_id: str, *, timeout_s: float) -> None:
        await self._unary("AbortTurn", request_id, timeout_s, request_id)

    async def session_info(self, session: SessionKey, *, timeout_s: float) -> HistoryInfo:
        info: HistoryInfo = await self._unary("SessionInfo", session, timeout_s)
        return info


def _metadata(request_id: str) -> tuple[tuple[str, str], ...]:
    sendable = request_id.isascii() and request_id.isprintable()
    named = ((REQUEST_ID_KEY, request_id),) if request_id and sendable else ()
    return (*named, *carrier().items())
