"""The parts that every service's process needs: addresses, the ready file, signals.

start ──► listen ──► announce_ready(ready_file) ──► wait_for_signal() ──► close_within(...) ──► exit
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Mapping
from pathlib import Path

import structlog

from kvferry.shared.errors import ConfigurationError

logger = structlog.get_logger(__name__)

HANDSHAKE_S = 5.0
"""How long a connection to any port may take to begin, with a proof of its key or a first message, before it
is closed."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
EXIT_LOST = 70
LOSS_GRACE_S = 2.0
"""Time for the errors of a lost device's requests to reach the router."""
_M_ARENA_MAX, _MAX_ARENAS = -8, 2
"""The parameter of glibc's `mallopt`, and its value."""


def share_free_memory() -> None:
    """Let all threads of this process allocate from few places, where the system's allocator is glibc.

    By default each thread gets its own, whose free memory other threads cannot use: in a soak, prefill
    workers with 35 threads had 3 % less memory with two. `MALLOC_ARENA_MAX` overrides this. Call it first.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(_M_ARENA_MAX, _MAX_ARENAS)


# ---- addresses -------------------------------------------------------------------------------------------


def parse_address(option: str, value: str) -> tuple[str, int]:
    """Split `host:port` or `[v6]:port` into host and port.

    Raises: ConfigurationError naming the option, its value and what is allowed.
    """
    host, colon, port = value.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigurationError(f"{option} is {value!r}; it must be host:port with a port of 0 to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(host: str) -> bool:
    """Return whether a host can be reached only from this machine."""
    return host in ("localhost", "::1") or host.startswith("127.")


def format_address(host: str, port: int) -> str:
    """Format an address, the inverse of `parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reachable(address: str) -> str:
    """Return where a local client connects to a bound `host:port`: loopback if bound to all addresses."""
    host, port = parse_address("address", address)
    return format_address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)


def bind(option: str, value: str, *, backlog: int | None = None) -> socket.socket:
    """Listen on an address. Raises: ConfigurationError naming the option."""
    host, port = parse_address(option, value)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=backlog)
    except OSError as error:
        raise ConfigurationError(f"{option} is {value!r}; it cannot be bound: {error}") from error


# ---- start and stop of a process -------------------------------------------------------------------------


def announce_ready(path: str, info: Mapping[str, str]) -> None:
    """Write one JSON line with a service's addresses, so that the process which started it learns its ports.

    The file is written atomically. An empty path does nothing.

    Raises: ConfigurationError if the file cannot be written.
    """
    if not path:
        return
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(dict(info), sort_keys=True) + "\n", encoding="utf-8")
        os.replace(partial, target)
    except OSError as error:
        raise ConfigurationError(f"ready_file is {path!r}; it cannot be written: {error}") from error


async def wait_for_signal() -> signal.Signals:
    """Wait for SIGINT or SIGTERM and return it. A second signal has its usual effect and ends the process."""
    loop = asyncio.get_running_loop()
    received: asyncio.Queue[signal.Signals] = asyncio.Queue()
    earlier = {number: signal.getsignal(number) for number in _SIGNALS}
    for number in _SIGNALS:
        loop.add_signal_handler(number, received.put_nowait, number)
    try:
        return await received.get()
    finally:
        for number, handler in earlier.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


async def serve_until_signal(role: str, addresses: Mapping[str, str], ready_file: str) -> None:
    """Write the ready file of a service that listens, then wait for SIGINT or SIGTERM. The next one ends the
    process at once.

    Args: addresses: `address` (control or HTTP, host:port), `metrics` (host:port), of workers `blocks`.
    """
    announce_ready(ready_file, {"service": role, **addresses})
    logger.info(f"{role} listens", **addresses)
    await wait_for_signal()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # asyncio would close everything in order
    logger.info(f"{role} stops")


def end_within(timeout_s: float) -> None:
    """End the process if it has not ended by then, whatever its threads wait for."""

    def end() -> None:
        time.sleep(timeout_s)
        logger.error("the process did not stop in time and is ended", timeout_s=timeout_s)
        os._exit(1)

    threading.Thread(target=end, name="end-within", daemon=True).start()


def end_process(error: BaseException) -> None:
    """End this process with `EXIT_LOST`, soon, because its device or one of its ranks is lost, and let its
    supervisor start another. Nothing is closed: that would wait for the device.

    After an illegal address, a kernel that does not end or a fault of the hardware every later call on the
    device fails. The requests get an error first that lets the router replay them elsewhere.
    """
    logger.critical("the device or a rank is lost; the worker ends", error=f"{type(error).__name__}: {error}")
    timer = threading.Timer(LOSS_GRACE_S, os._exit, (EXIT_LOST,))
    timer.daemon = True
    timer.start()


async def close_within(timeout_s: float, what: str, closing: Awaitable[object]) -> bool:
    """Await a graceful close for at most `timeout_s` seconds; return whether it ended in time."""
    try:
        await asyncio.wait_for(closing, timeout_s)
    except TimeoutError:
        logger.warning("close timed out", what=what, timeout_s=timeout_s)
        return False
    return True
