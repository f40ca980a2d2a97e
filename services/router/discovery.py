"""From the configured names of workers to their addresses: a name may resolve to many, and to others later.

Host names are resolved with the system's resolver; addresses pass as they are.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable

from kvferry.shared.serving import format_address, parse_address

Resolve = Callable[[str], Awaitable[tuple[str, ...]]]


async def resolve_address(target: str, *, timeout_s: float = 5.0) -> tuple[str, ...]:
    """The `host:port` addresses behind a `host:port` target, sorted; empty where the name has none now."""
    host, port = parse_address("worker", target)
    try:
        ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        return (target,)
    try:
        async with asyncio.timeout(timeout_s):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError):
        return ()
    hosts = {
        str(address[0]) for family, _, _, _, address in found if family in (socket.AF_INET, socket.AF_INET6)
    }
    if any(":" not in entry for entry in hosts):
        # A name with both families is one machine twice; IPv4 alone names each machine once.
        hosts = {entry for entry in hosts if ":" not in entry}
    return tuple(sorted(format_address(entry, port) for entry in hosts))


async def keep_name(target: str) -> tuple[str, ...]:
    """For workers in this process, whose names are not addresses."""
    return (target,)
