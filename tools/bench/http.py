"""Server-sent events over HTTP/1.1 with little work for each event, so that the client does not slow a server
on the same machine: about half of the processor time that httpx takes."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import h11

from kvferry.shared.errors import KvferryError

OnEvent = Callable[[bytes, float], bool]
"""Takes an event's data and when it came (`time.perf_counter`); False closes the stream."""

_READ_BYTES = 1 << 16
_MAX_ERROR_BYTES = 1 << 16


class HttpStatus(KvferryError):
    """The server answered with an error.

    Attributes: status: of HTTP; body: what came with it.
    """

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP status {status}: {body[:500].decode('utf-8', 'replace')}")
        self.status = status


class Stale(Exception):
    """The server has closed a connection that was idle."""


class _Connection:
    """One connection; one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._protocol = h11.Connection(h11.CLIENT)
        self.was_used = False

    async def stream(self, request: h11.Request, body: bytes, on_event: OnEvent) -> bool:
        """Send a request and read its events. Returns whether the connection can take another."""
        protocol = self._protocol
        parts = (
            protocol.send(request),
            protocol.send(h11.Data(data=body)),
            protocol.send(h11.EndOfMessage()),
        )
        self._writer.write(b"".join(part for part in parts if part))
        rest, status = b"", 0
        while True:
            event = protocol.next_event()
            if event is h11.NEED_DATA:
                data = await self._read()
                if not data and not status and self.was_used:
                    raise Stale
                now_s = time.perf_counter()
                protocol.receive_data(data)
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                rest = (rest + event.data).replace(b"\r\n", b"\n")
                if status != 200:
                    rest = rest[:_MAX_ERROR_BYTES]
                    continue
                *blocks, rest = rest.split(b"\n\n")
                for line in (line for block in blocks for line in block.split(b"\n")):
                    if line.startswith(b"data:") and not on_event(line[5:].strip(), now_s):
                        return False
            elif isinstance(event, h11.EndOfMessage):
                break
            elif isinstance(event, h11.ConnectionClosed):
                raise ConnectionResetError("the server closed the connection")
        if status != 200:
            raise HttpStatus(status, rest)
        if protocol.our_state is h11.MUST_CLOSE or protocol.their_state is h11.MUST_CLOSE:
            return False
        protocol.start_next_cycle()
        self.was_used = True
        return True

    async def _read(self) -> bytes:
        try:
            return await self._reader.read(_READ_BYTES)
        except ConnectionResetError:
            if self.was_used:
                raise Stale from None
            raise

    def close(self) -> None:
        self._writer.close()


class EventClient:
    """A server's streams. Idle connections are used again."""

    def __init__(self, url: str, api_key: str) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        self._headers = [("Host", parts.netloc), ("Content-Type", "application/json")]
        if api_key:
            self._headers.append(("Authorization", f"Bearer {api_key}"))
        self._idle: list[_Connection] = []

    async def post(self, path: str, body: bytes, on_event: OnEvent) -> None:
        """Send a request and hand its events to `on_event`.

        Raises:
            HttpStatus: the status is not 200.
            OSError: the connection failed.
            h11.RemoteProtocolError: the answer is cut off or is not HTTP.
        """
        request = h11.Request(
            method="POST",
            target=self._prefix + path,
            headers=[*self._headers, ("Content-Length", str(len(body)))],
        )
        while True:
            connection = self._idle.pop() if self._idle else await self._open()
            usable = False
            try:
                usable = await connection.stream(request, body, on_event)
                return
            except Stale:
                continue
            finally:
                if usable:
                    self._idle.append(connection)
                else:
                    connection.close()

    async def _open(self) -> _Connection:
        return _Connection(*await asyncio.open_connection(self._host, self._port, ssl=self._tls))

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
