"""Proxies before a block endpoint that cut connections between two messages, or within one."""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Iterator

from kvferry.shared.wire.shared_memory import socket_address
from kvtest.ports import unreachable_endpoint
from kvtest.relay import Relay

_GREETING_BYTES = 64
_MORE, _LONG, _COMMAND = 1, 2, 4


class CuttingProxy(Relay):
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
        listener, self.endpoint = self._listen()
        super().__init__(listener)

    def _listen(self) -> tuple[socket.socket, str]:
        listener = socket.create_server(("127.0.0.1", 0))
        return listener, f"tcp://127.0.0.1:{listener.getsockname()[1]}"

    def _connect(self) -> socket.socket:
        host, port = self.target.removeprefix("tcp://").rsplit(":", 1)
        return socket.create_connection((host, int(port)))

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        for message in self._messages(client, server):
            if self.cuts:
                if self.cuts[0] == 0:
                    del self.cuts[0]
                    self.num_cuts += 1
                    self._send(server, message[: len(message) // 2] if self.within else b"")
                    return
                self.cuts[0] -= 1
            self._send(server, message)

    def _send(self, server: socket.socket, data: bytes) -> None:
        server.sendall(data)
        self.forwarded_bytes += len(data)

    def _messages(self, client: socket.socket, server: socket.socket) -> Iterator[bytes]:
        """The sender's ZMTP messages whole, with keys each frame for itself; its greeting and commands are
        forwarded."""
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


class CuttingRingProxy(CuttingProxy):
    """Stands between the Unix sockets of a sender and a receiver that share memory.

    A message is one packet, so `within` has no effect. `forwarded_bytes` counts what packets refer to.
    """

    def _listen(self) -> tuple[socket.socket, str]:
        endpoint = unreachable_endpoint()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(socket_address(endpoint) or "")
        listener.listen()
        return listener, endpoint

    def _connect(self) -> socket.socket:
        server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        server.connect(socket_address(self.target) or "")
        return server

    def _send(self, server: socket.socket, data: bytes) -> None:
        if data:
            server.sendall(data)
            _, count = struct.unpack_from("=QI", data)
            self.forwarded_bytes += sum(array.array("I", data[12 : 12 + 4 * count]))

    def _messages(self, client: socket.socket, server: socket.socket) -> Iterator[bytes]:
        hello, descriptors, _, _ = socket.recv_fds(client, 1 << 16, 1)
        socket.send_fds(server, [hello], descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        while packet := client.recv(1 << 16):
            yield packet
