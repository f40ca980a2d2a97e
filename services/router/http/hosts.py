"""Which hosts requests may name where no key is needed.

A page elsewhere can have its own name point to an address of this machine or network (DNS rebinding). Its
browser then takes this server for the page's own, and lets it read answers. It cannot have a name that only
the network itself gives out, or an address, and not a certificate for this server.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Collection

from kvferry.shared.errors import PermissionDenied
from kvferry.shared.serving import parse_address

_PRIVATE = (".localhost", ".local", ".internal", ".lan", ".home.arpa", ".svc")
"""Ends of names that no public server resolves."""


class HostCheck:
    """Refuses requests by the host that they name.

    Args:
        needs_no_key: whether anyone may chat, at the moment.
        allowed: further names; "*" is any.
        listen: the address that the server was given.
    """

    def __init__(self, needs_no_key: Callable[[], bool], allowed: Collection[str], listen: str) -> None:
        self._needs_no_key = needs_no_key
        self._any = "*" in allowed
        host, _ = parse_address("listen", listen)
        self._allowed = {name.lower() for name in (*allowed, host, socket.gethostname())}

    def __call__(self, host: str) -> None:
        """Args: host: a request's, with or without a port; empty where it has none, as browsers' always have.

        Raises: PermissionDenied.
        """
        if self._any or not self._needs_no_key():
            return
        name = _name_of(host)
        if name in self._allowed or _is_local(name):
            return
        raise PermissionDenied(
            f"The request is for the host {name[:100]!r}. Without API keys this server answers only those "
            "for an address, a name of the local network, or one of --allowed-hosts",
            reason="host",
        )


def _name_of(host: str) -> str:
    """The host without its port, in lower case."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).strip("[]").rstrip(".").lower()


def _is_local(name: str) -> bool:
    if "." not in name and ":" not in name:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.endswith(_PRIVATE)
    return True
