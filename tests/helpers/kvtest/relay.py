"""Stands between clients and a server, with two threads for each connection."""

from __future__ import annotations

import contextlib
import socket
import threading


class Relay:
    """Forwards connections to a server. What passes, and how, is for `_forward` and `_backward` to say; where
    one of them returns or fails, both ends hear of it.

    A descriptor that is closed while another thread is about to read from it may by then be that of another
    socket, whose bytes would be lost. So others only shut a socket down; the thread that has seen both
    directions end closes it.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, name="relay", daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        with self._lock:
            for each in (self._listener, *self._sockets):
                _shut(each)
        for thread in self._threads:  # more are added only before the first one ends
            thread.join()

    def _connect(self) -> socket.socket:
        """A new connection to the server. Raises OSError: it is down, and so is the way to it."""
        raise NotImplementedError

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        raise NotImplementedError

    def _backward(self, server: socket.socket, client: socket.socket) -> None:
        while data := server.recv(1 << 16):
            client.sendall(data)

    def _accept(self) -> None:
        with contextlib.suppress(OSError), self._listener:
            while True:
                client, _ = self._listener.accept()
                try:
                    server = self._connect()
                except OSError:
                    client.close()
                    continue
                with self._lock:
                    self._sockets |= {client, server}
                self._threads.append(threading.Thread(target=self._run, args=(client, server), daemon=True))
                self._threads[-1].start()

    def _run(self, client: socket.socket, server: socket.socket) -> None:
        def work(forward: bool) -> None:
            try:
                with contextlib.suppress(OSError):
                    if forward:
                        self._forward(client, server)
                    else:
                        self._backward(server, client)
            finally:
                _shut(client)
                _shut(server)

        back = threading.Thread(target=work, args=(False,), daemon=True)
        back.start()
        try:
            work(True)
        finally:
            back.join()
            with self._lock:
                for each in (client, server):
                    each.close()
                    self._sockets.remove(each)


def _shut(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
