"""ASGI middleware that bounds what a client may send: the head's size, the body's size and its time.

Reads the whole body before the application sees the request, so that handlers never wait for a slow client.
The time for the head, before there is a request at all, is `http_protocol.py`'s matter.
"""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvferry.shared.errors import Cancelled, HeadersTooLarge, InvalidRequest, PayloadTooLarge, RequestTimeout

# A body over the limit is read on for a while, so that the client has sent it and reads the answer rather
# than a reset connection.
_DRAIN_BYTES = 64 << 20


class RequestLimits:
    """Hands the application a request whose body is complete, or raises.

    Raises: HeadersTooLarge, PayloadTooLarge, RequestTimeout; Cancelled where the client left meanwhile.
    """

    def __init__(
        self, app: ASGIApp, *, max_header_bytes: int, max_body_bytes: int, read_timeout_s: float
    ) -> None:
        self._app = app
        self._max_header_bytes = max_header_bytes
        self._max_body_bytes = max_body_bytes
        self._read_timeout_s = read_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._check_head(scope)
        try:
            async with asyncio.timeout(self._read_timeout_s):
                body = await self._read_body(Headers(scope=scope), receive)
        except TimeoutError:
            raise RequestTimeout(f"The body was not complete within {self._read_timeout_s:g} s") from None
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        await self._app(scope, replay, send)

    def _check_head(self, scope: Scope) -> None:
        size_bytes = len(scope.get("raw_path", b"")) + len(scope["query_string"])
        size_bytes += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if size_bytes > self._max_header_bytes:
            raise HeadersTooLarge(
                f"The request's head has {size_bytes} bytes; at most {self._max_header_bytes} are allowed"
            )

    async def _read_body(self, headers: Headers, receive: Receive) -> bytes:
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


def _content_length(headers: Headers) -> int:
    value = headers.get("content-length", "0")
    if not (value.isascii() and value.isdigit()):
        raise InvalidRequest(f"Content-Length is {value[:40]!r}; it must be a number of bytes")
    return int(value)
