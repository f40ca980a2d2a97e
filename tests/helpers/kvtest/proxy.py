"""A TCP proxy before a block endpoint that cuts connections between two messages, or within one."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

_GREETING_BYTES = 64
_MORE, _LONG, _COMMAND = 1, 2, 4


class CuttingProxy:
    """Forwards connections to an endpoint, and cuts them.

    Attributes:
        cuts: after how many messages of the sender, counted from now, the connection is cut; then after how
            many more, and so on.
        target: `tcp://host:port` of the server; may be set after the proxy's own endpoint was advertised.
        within: whether half of the next message is forwarded before the cut.
        num_cuts: connections that were cut.
        forwarded_bytes: what reached the server.
    """

    def __init__(self, target: str = "") -> None:
        self.target = target
        self.cuts: list[int] = []
        self.within = False
        self.num_cuts = 0
        self.forwarded_bytes = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, name="cutting-proxy", daemon=True).start()

    def close(self) -> None:
        for each in (self._listener, *self._sockets):
            _end(each)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                host, port = self.target.removeprefix("tcp://").rsplit(":", 1)
                server = socket.create_connection((host, int(port)))
                self._sockets += [client, server]
                for work, its in ((self._forward, (client, server)), (_pipe, (server, client))):
                    threading.Thread(target=work, args=its, daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for message in _messages(client, server):
                if self.cuts:
                    if self.cuts[0] == 0:
                        del self.cuts[0]
                        self.num_cuts += 1
                        self._send(server, message[: len(message) // 2] if self.within else b"")
                        break
                    self.cuts[0] -= 1
                self._send(server, message)
        _end(client)
        _end(server)

    def _send(self, server: socket.socket, data: bytes) -> None:
        server.sendall(data)
        self.forwarded_bytes += len(data)


def _messages(client: socket.socket, server: socket.socket) -> Iterator[bytes]:
    """The sender's ZMTP messages whole; its greeting and commands are forwarded."""
    reader = client.makefile("rb")
    for _ in range(_GREETING_BYTES):  # each end waits for the first part of the other's
        server.sendall(reader.read(1))
    message = b""
    while flags := reader.read(1):
        size = reader.read(8 if flags[0] & _LONG else 1)
        frame = flags + size + reader.read(int.from_bytes(size, "big"))
        if flags[0] & _COMMAND:
            server.sendall(frame)
            continue
        message += frame
        if not flags[0] & _MORE:
            yield message
            message = b""


def _pipe(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    _end(source)
    _end(target)


def _end(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()
