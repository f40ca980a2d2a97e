"""NIXL's agent and the memory that it writes to and from; nothing else here calls the package `nixl`.

Place in the request's path: under the channels beside it. Imported only where a worker is told to use
NIXL, because the package is large and optional.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry.shared.errors import ConfigurationError

BACKEND = "UCX"
INSTALL = "pip install 'kvferry[nixl]'"
MAX_METADATA_BYTES = 32 << 10
_DEVICES = "UCX_NET_DEVICES"

_RETIRED: list[mmap.mmap] = []
"""Kept mapped for as long as the process runs."""


class NixlFailed(Exception):
    """A call of NIXL failed. The channel goes on without NIXL, so nobody else sees this."""


@dataclass(frozen=True, kw_only=True)
class Remote:
    """Another agent's memory, to which this process may write."""

    agent: str
    memory: str
    device: int
    address: int


class RegisteredMemory:
    """Memory of this process that NIXL reads from or writes to.

        registered ──free()──► given back            (nothing is in flight, and both ends say so)
             └── retire() ──► kept, never used again (something may be in flight)

    A one-sided write cannot be called back: it may land long after its sender gave up, also when this process
    has deregistered the memory, because UCX writes to bare addresses over some of its transports. So what
    may still be written to is never given to anything else: the pages are freed, their addresses are not.
    """

    def __init__(self, agent: NixlAgent, size_bytes: int) -> None:
        """Raises: NixlFailed: it cannot be registered."""
        self._agent = agent
        self._map = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.address = int(self.bytes.ctypes.data)
        self._registration = agent.register(self.address, size_bytes)

    def offer(self) -> bytes:
        """What another agent needs to write to this memory and to no other of this process."""
        return self._agent.metadata_of(self._registration)

    def free(self) -> None:
        """Give the memory back, once those who have views of it let go."""
        self._agent.deregister(self._registration)

    def retire(self) -> None:
        """Give the pages back, but never the addresses."""
        self._agent.deregister(self._registration)
        self._map.madvise(mmap.MADV_DONTNEED)
        _RETIRED.append(self._map)


class NixlAgent:
    """One end's agent. Made by any thread, then used by one at a time.

    It has no thread of its own, which would keep a processor busy: writes progress, at both ends, while
    `is_written` or `progress` is called.
    """

    def __init__(self, *, loopback_only: bool) -> None:
        """
        Args: loopback_only: listen for writes on the loopback interface, unless the environment's
            UCX_NET_DEVICES says otherwise.

        Raises: ConfigurationError: the package is not installed, or does not work here.
        """
        if loopback_only:
            os.environ.setdefault(_DEVICES, "lo")
        try:
            import nixl
        except ImportError as error:
            raise ConfigurationError(f"transport is 'nixl', which needs {INSTALL}: {error}") from error
        logging.getLogger("nixl").setLevel(logging.WARNING)
        self._errors: tuple[type[Exception], ...] = (
            RuntimeError,
            ValueError,
            *(its for name, its in vars(nixl._bindings).items() if name.endswith("Error")),
        )
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[BACKEND])
        try:
            self._agent: Any = nixl.nixl_agent(f"kvferry-{uuid.uuid4()}", config)
            if BACKEND not in self._agent.backends:
                raise RuntimeError(f"it has no {BACKEND} plugin")
        except self._errors as error:
            raise ConfigurationError(f"transport is 'nixl', which does not work here: {error!r}") from error

    # ---- own memory --------------------------------------------------------------------------------------

    def register(self, address: int, size_bytes: int) -> Any:
        """Raises: NixlFailed."""
        with self._failing():
            return self._agent.register_memory([(address, size_bytes, 0, "")], "DRAM", [BACKEND])

    def deregister(self, registration: Any) -> None:
        with contextlib.suppress(*self._errors):
            self._agent.deregister_memory(registration, [BACKEND])

    def metadata_of(self, registration: Any) -> bytes:
        """Raises: NixlFailed."""
        with self._failing():
            return bytes(self._agent.get_partial_agent_metadata(registration, True, [BACKEND]))

    def progress(self) -> None:
        """Take what other agents write, where the network needs this process for it."""
        with contextlib.suppress(*self._errors):
            self._agent.get_new_notifs()

    # ---- other agents' memory ----------------------------------------------------------------------------

    def connect(self, metadata: bytes) -> str:
        """Another agent, by what it offers; returns its name. Raises: NixlFailed."""
        with self._failing():
            name = self._agent.add_remote_agent(metadata)
            return name.decode() if isinstance(name, bytes) else str(name)

    def disconnect(self, agent: str) -> None:
        with contextlib.suppress(*self._errors):
            self._agent.remove_remote_agent(agent)

    def write(self, source: RegisteredMemory, remote: Remote, start: int, num_bytes: int) -> Any:
        """Begin to write bytes to the same place of another agent's memory. Raises: NixlFailed."""
        with self._failing():
            here = self._agent.get_xfer_descs([(source.address + start, num_bytes, 0)], "DRAM")
            there = self._agent.get_xfer_descs(
                [(remote.address + start, num_bytes, remote.device)], remote.memory
            )
            handle = self._agent.initialize_xfer("WRITE", here, there, remote.agent, b"", [BACKEND])
            if self._agent.transfer(handle) == "ERR":
                raise RuntimeError("the write was refused")
            return handle

    def is_written(self, handle: Any) -> bool:
        """Whether every byte is in the other agent's memory: UCX flushes at the end. Raises: NixlFailed."""
        with self._failing():
            state = self._agent.check_xfer_state(handle)
            if state == "ERR":
                raise RuntimeError("the write failed")
            if state == "DONE":
                handle.release()
            return bool(state == "DONE")

    def abandon(self, handle: Any) -> None:
        """Give a write up. It may happen nevertheless."""
        with contextlib.suppress(*self._errors):
            handle.release()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise NixlFailed(f"{type(error).__name__}: {error}") from error
