"""How blocks travel between workers, by the name that `--transport` says.

    zmq      ZeroMQ between machines, shared memory between processes of one (`shared_memory.py`)
    others   installed packages', entry points of the group `kvferry.transports`

A transport is a layer above the network's channels (`zmq.py`): it carries what it can, and the network the
rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Protocol

from kvferry.shared.errors import ConfigurationError
from kvferry.shared.wire.channel import Channel, ConnectingNetwork, ListeningChannel, ListeningNetwork
from kvferry.shared.wire.shared_memory import SharedMemoryConnectingChannel, SharedMemoryListeningChannel

if TYPE_CHECKING:
    from kvferry.shared.process.config import WorkerSettings

GROUP = "kvferry.transports"


class Transport(Protocol):
    """Makes a worker's channels.

    Attributes: protects_blocks: whether nobody without the worker's keys can read, change or send blocks.
        Otherwise workers with certs refuse the transport, except with `--insecure`.
    """

    protects_blocks: bool

    def connecting(self, network: ConnectingNetwork, on_connected: Callable[[str], None]) -> Channel:
        """Make a sender's channel. Args: on_connected: gets the name of each receiver's transport."""

    def listening(self, network: ListeningNetwork) -> ListeningChannel:
        """Make a receiver's channel."""


class SharedMemory:
    """Shared memory on one machine, where the two ends are processes of one user; else the network."""

    protects_blocks = True

    def __init__(self, settings: WorkerSettings) -> None:
        """Make the transport. Args: settings: not used."""

    def connecting(self, network: ConnectingNetwork, on_connected: Callable[[str], None]) -> Channel:
        return SharedMemoryConnectingChannel(network, on_connected=on_connected)

    def listening(self, network: ListeningNetwork) -> ListeningChannel:
        return SharedMemoryListeningChannel(network)


TRANSPORTS: Mapping[str, Callable[[WorkerSettings], Transport]] = {"zmq": SharedMemory}


def make_transport(settings: WorkerSettings) -> Transport:
    """Make the transport that a worker's settings name.

    Raises: ConfigurationError: it is not installed, cannot be loaded, or does not protect blocks where
        the settings ask for that; or what the installed one raises.
    """
    name = settings.transport
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name in TRANSPORTS:
        made = TRANSPORTS[name](settings)
    elif name in installed:
        try:
            make = installed[name].load()
        except (ImportError, AttributeError) as error:
            raise ConfigurationError(f"entry point {name!r} of {GROUP} cannot be loaded: {error}") from error
        made = make(settings)
    else:
        known = ", ".join([*TRANSPORTS, *sorted(installed)])
        raise ConfigurationError(f"transport is {name!r}; {known} are installed")
    if not made.protects_blocks and settings.certs and not settings.insecure:
        raise ConfigurationError(
            f"transport is {name!r} with certs, and does not protect blocks with them: use zmq, or set "
            "insecure to accept that on a private network"
        )
    return made
