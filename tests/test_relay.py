"""A relay of the tests takes no byte of another connection."""

from __future__ import annotations

import socket
import threading

from kvtest.relay import Relay


class Tardy(Relay):
    """Cuts a connection at once, while one of its threads is only about to read from it."""

    def __init__(self, target: socket.socket) -> None:
        self.target = target.getsockname()
        self.server: socket.socket | None = None
        self.may_read = threading.Event()
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        super().__init__(listener)

    def _connect(self) -> socket.socket:
        self.server = socket.create_connection(self.target)
        return self.server

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        pass

    def _backward(self, server: socket.socket, client: socket.socket) -> None:
        assert self.may_read.wait(30)
        super()._backward(server, client)


def test_a_descriptor_is_not_closed_while_a_thread_is_about_to_read_from_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as target:
        relay = Tardy(target)
        with socket.create_connection(relay.address, timeout=30) as client:
            assert client.recv(1) == b""
        assert relay.server is not None
        assert relay.server.fileno() != -1
        relay.may_read.set()
        relay.close()
        assert relay.server.fileno() == -1
