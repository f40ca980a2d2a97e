"""TCP ports for servers that cannot report theirs, and endpoints where nobody listens."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import random
import socket
import tempfile
from pathlib import Path
from typing import IO

_numbers = itertools.count()
_PORTS = range(20_000, 32_000)
"""The kernel gives none of these to sockets that ask for any port."""
_reserved: list[IO[str]] = []


def free_port() -> int:
    """Return a free TCP port of the loopback interface, which no other call of any process returns before
    this process ends: a server may be killed and started there again."""
    folder = Path(tempfile.gettempdir()) / f"kvferry-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for port in random.Random(os.urandom(8)).sample(_PORTS, len(_PORTS)):
        lock = (folder / str(port)).open("w")
        with contextlib.suppress(OSError), socket.socket() as probe:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            _reserved.append(lock)
            return port
        lock.close()
    raise RuntimeError(f"no port of {_PORTS} is free")


def unreachable_endpoint() -> str:
    """A block endpoint that no other call here or in a neighbouring process gets, and TCP cannot reach."""
    high, low = divmod(next(_numbers), 250)
    return f"tcp://127.{os.getpid() % 250}.{high}.{1 + low}:1"
