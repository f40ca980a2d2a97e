"""uvicorn's HTTP/1.1 protocol with what it lacks: a deadline for a request's head, a deadline for clients
that read nothing, and refusals in the OpenAI shape for what never becomes a request.

Works on connections only; requests that are well-formed pass through unchanged.
"""

from __future__ import annotations

import asyncio
import json

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvferry.services.router.errors import error_body
from kvferry.shared.errors import HeadersTooLarge, InvalidRequest, KvferryError, RequestTimeout

_LINGER_S = 1.0


class BoundedH11Protocol(H11Protocol):
    """One connection.

        accepted ──head timer──► request ──► response ──► idle (uvicorn's keep-alive timer)
                       ▲                                    │ first byte of the next head
                       └────────────────────────────────────┘

    While the client's receive window is full, a write timer runs as well; at its end the connection is reset.
    """

    read_timeout_s = 30.0
    write_timeout_s = 60.0

    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self.resume_writing()
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
        """Called by uvicorn where h11 cannot parse what came."""
        buffered_bytes = len(self.conn.trailing_data[0])
        limit_bytes = self.config.h11_max_incomplete_event_size or 0
        if limit_bytes and buffered_bytes > limit_bytes:
            self._refuse(HeadersTooLarge(f"The request's head is larger than {limit_bytes} bytes"))
        else:
            self._refuse(InvalidRequest("What was sent is not a valid HTTP/1.1 request"))

    def _refuse(self, error: KvferryError) -> None:
        """Answer what never became a request, and close."""
        if self.conn.our_state is not h11.IDLE or self.transport.is_closing():
            self.transport.close()
            return
        body = json.dumps(error_body(error)).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        answer = h11.Response(status_code=error.http_status, headers=headers, reason=b"")
        for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        # Closing with unread bytes resets the connection, and the client might never see the answer: stop
        # writing, and read on for a moment.
        self._refused = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)

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


def protocol_class(*, read_timeout_s: float, write_timeout_s: float) -> type[BoundedH11Protocol]:
    """The protocol with its two timeouts, as uvicorn wants it: a class."""
    return type(
        "RouterHttpProtocol",
        (BoundedH11Protocol,),
        {"read_timeout_s": read_timeout_s, "write_timeout_s": write_timeout_s},
    )
