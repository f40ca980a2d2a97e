"""gRPC clients of the two control interfaces; to the router they are the interfaces themselves.

Place in the request's path: the router calls, a worker's `server.py` answers. Maps statuses back to errors;
does not retry, choose workers or reinterpret deadlines.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

import grpc

from kvferry.shared.control import codec
from kvferry.shared.control.codec import Codec
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

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class _Client:
    """One channel to one worker's service."""

    def __init__(self, address: str, service: str, max_message_bytes: int) -> None:
        self._address = address
        self._service = service
        self._channel = grpc.aio.insecure_channel(
            address,
            options=(
                *_OPTIONS,
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", max_message_bytes),
            ),
        )

    async def close(self) -> None:
        """Cancel the calls under way and close the connection. Idempotent."""
        await self._channel.close(None)

    async def _unary(
        self,
        method: str,
        request: _Request,
        codecs: tuple[Codec[_Request], Codec[_Response]],
        *,
        timeout_s: float,
        request_id: str = "",
    ) -> _Response:
        call: Any = self._channel.unary_unary(f"/{self._service}/{method}", None, None)(
            codecs[0].encode(request), timeout=timeout_s, metadata=_metadata(request_id)
        )
        try:
            data = await call
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from error
        except asyncio.CancelledError:
            await self._raise_if_peer_cancelled(call)
            raise
        return self._decoded(codecs[1], data)

    async def _stream(
        self,
        method: str,
        request: _Request,
        codecs: tuple[Codec[_Request], Codec[_Response]],
        *,
        timeout_s: float,
        request_id: str,
    ) -> AsyncGenerator[_Response, None]:
        call: Any = self._channel.unary_stream(f"/{self._service}/{method}", None, None)(
            codecs[0].encode(request), timeout=timeout_s, metadata=_metadata(request_id)
        )
        try:
            async for data in call:
                yield self._decoded(codecs[1], data)
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

    async def _raise_if_peer_cancelled(self, call: Any) -> None:
        """grpc.aio raises CancelledError for the worker's status CANCELLED, too: tell it from the
        cancellation of our own task."""
        task = asyncio.current_task()
        if call.done() and (task is None or not task.cancelling()):
            metadata = await call.trailing_metadata() or ()
            raise from_status(
                await call.code(), await call.details() or "", metadata, peer=self._address
            ) from None

    def _decoded(self, response: Codec[_Response], data: bytes) -> _Response:
        try:
            return response.decode(data)
        except InvalidRequest as error:
            raise WorkerUnavailable(
                f"{self._address} sent an answer that cannot be read: {error.message}", reason="bad_answer"
            ) from error


class GrpcDecodeClient(_Client):
    """Implements `DecodeControl` over gRPC."""

    def __init__(self, address: str, *, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES) -> None:
        """`address` is host:port, or any gRPC target. Connects on the first call; make it in the loop that
        uses it."""
        super().__init__(address, codec.DECODE_SERVICE, max_message_bytes)

    def generate(self, request: GenerateRequest, *, timeout_s: float) -> AsyncGenerator[GenerateEvent, None]:
        return self._stream(
            "Generate",
            request,
            (codec.GENERATE_REQUEST, codec.GENERATE_EVENT),
            timeout_s=timeout_s,
            request_id=request.request_id,
        )

    async def finish(self, request_id: str, *, timeout_s: float) -> None:
        await self._unary(
            "Finish",
            request_id,
            (codec.FINISH_REQUEST, codec.FINISH_RESPONSE),
            timeout_s=timeout_s,
            request_id=request_id,
        )

    async def drop_session(self, session: SessionKey, *, timeout_s: float) -> HistoryInfo:
        codecs = (codec.SESSION_KEY, codec.HISTORY_INFO)
        return await self._unary("DropSession", session, codecs, timeout_s=timeout_s)

    async def status(self, *, timeout_s: float) -> WorkerStatus:
        return await self._unary(
            "Status", None, (codec.STATUS_REQUEST, codec.WORKER_STATUS), timeout_s=timeout_s
        )


class GrpcPrefillClient(_Client):
    """Implements `PrefillControl` over gRPC."""

    def __init__(self, address: str, *, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES) -> None:
        """See `GrpcDecodeClient`."""
        super().__init__(address, codec.PREFILL_SERVICE, max_message_bytes)

    def prefill(self, request: PrefillRequest, *, timeout_s: float) -> AsyncGenerator[PrefillEvent, None]:
        return self._stream(
            "Prefill",
            request,
            (codec.PREFILL_REQUEST, codec.PREFILL_EVENT),
            timeout_s=timeout_s,
            request_id=request.request_id,
        )

    async def commit_turn(self, request: CommitTurnRequest, *, timeout_s: float) -> HistoryInfo:
        return await self._unary(
            "CommitTurn",
            request,
            (codec.COMMIT_TURN_REQUEST, codec.HISTORY_INFO),
            timeout_s=timeout_s,
            request_id=request.request_id,
        )

    async def abort_turn(self, request_id: str, *, timeout_s: float) -> None:
        await self._unary(
            "AbortTurn",
            request_id,
            (codec.ABORT_TURN_REQUEST, codec.ABORT_TURN_RESPONSE),
            timeout_s=timeout_s,
            request_id=request_id,
        )

    async def session_info(self, session: SessionKey, *, timeout_s: float) -> HistoryInfo:
        codecs = (codec.SESSION_KEY, codec.HISTORY_INFO)
        return await self._unary("SessionInfo", session, codecs, timeout_s=timeout_s)

    async def drop_session(self, session: SessionKey, *, timeout_s: float) -> HistoryInfo:
        codecs = (codec.SESSION_KEY, codec.HISTORY_INFO)
        return await self._unary("DropSession", session, codecs, timeout_s=timeout_s)

    async def status(self, *, timeout_s: float) -> WorkerStatus:
        return await self._unary(
            "Status", None, (codec.STATUS_REQUEST, codec.WORKER_STATUS), timeout_s=timeout_s
        )


def _metadata(request_id: str) -> tuple[tuple[str, str], ...]:
    sendable = request_id.isascii() and request_id.isprintable()
    named = ((REQUEST_ID_KEY, request_id),) if request_id and sendable else ()
    return (*named, *carrier().items())
