"""TCP ports for servers that cannot report theirs, and endpoints where nobody listens."""

from __future__ import annotations

import itertools
import os
import socket

_numbers = itertools.count()


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def unreachable_endpoint() -> str:
    """A block endpoint that no other call here or in a neighbouring process gets, and TCP cannot reach."""
    high, low = divmod(next(_numbers), 250)
    return f"tcp://127.{os.getpid() % 250}.{high}.{1 + low}:1"
