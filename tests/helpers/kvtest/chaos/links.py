"""TCP proxies between the processes of a cluster, which harm the bytes that pass.

Every link is one listening port and one target. They all run on the event loop of the test, and know nothing
of the protocols above TCP.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field
from typing import Literal

CHUNK_BYTES = 1 << 16
CONNECT_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 1.0
REORDER_WAIT_S = 0.2

Side = Literal["client", "server"]
ByteFault = Literal["cut", "truncate", "delay", "hold", "duplicate", "reorder", "drop", "flip"]


@dataclass(kw_only=True)
class Armed:
    """A fault that strikes once, at the first byte after `after_bytes` more bytes of one direction.

        cut        close the connection before the chunk
        truncate   forward the first part of the chunk, then close the connection
        delay      forward the chunk `seconds` later; what follows waits behind it
        hold       keep both directions of every connection of the link for `seconds`: a partition
        duplicate  forward the chunk twice
        reorder    forward the chunk after the next one
        drop       leave out `size` bytes of the chunk
        flip       change `size` bytes of the chunk

    Attributes:
        toward: the end that the bytes go to.
        bits: which bits of a byte `flip` changes; 0: one, drawn for each byte.
        seed: draws places within the chunk.
    """

    kind: ByteFault
    toward: Side
    after_bytes: int
    seconds: float = 0.0
    size: int = 1
    bits: int = 0
    seed: int = 0
    struck: bool = False


@dataclass(eq=False)
class Link:
    """One proxy.

    Attributes:
        target_port: of the server; on loopback.
        armed: faults that have not struck yet.
    """

    name: str
    target_port: int
    port: int = 0
    armed: list[Armed] = field(default_factory=list)
    _server: asyncio.Server | None = None
    _open: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> None:
        self._open.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=CHUNK_BYTES)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        self.heal()
        if self._server is not None:
            self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def hold(self) -> None:
        """Let nothing pass until `heal`."""
        self._open.clear()

    def heal(self) -> None:
        """Forget what has not struck, and let bytes pass."""
        self.armed.clear()
        self._open.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of its own, because asyncio logs the cancellation of the one that it made.
        task = asyncio.create_task(self._forward(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # also where it is cancelled before it runs, or while it connects
        task.add_done_callback(lambda _: writer.close())

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                their_reader, their_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        except (OSError, TimeoutError):
            await _close(writer)
            return
        pumps = (
            asyncio.create_task(self._pump(reader, their_writer, "server")),
            asyncio.create_task(self._pump(their_reader, writer, "client")),
        )
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            # Both ends close before the first wait: a cancellation may end any of the waits.
            for end in (writer, their_writer):
                end.close()
            await asyncio.gather(*pumps, return_exceptions=True)
            for end in (writer, their_writer):
                await _close(end)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, toward: Side) -> None:
        """Forward until one end closes, or a fault closes the connection."""
        with contextlib.suppress(OSError):
            while chunk := await reader.read(CHUNK_BYTES):
                await self._open.wait()
                fault = self._due(toward, len(chunk))
                if fault is None:
                    writer.write(chunk)
                elif not await self._strike(fault, chunk, reader, writer):
                    return
                await writer.drain()

    def _due(self, toward: Side, num_bytes: int) -> Armed | None:
        """The fault that this chunk triggers."""
        due = None
        for fault in tuple(self.armed):
            if fault.toward != toward:
                continue
            fault.after_bytes -= num_bytes
            if fault.after_bytes < 0 and due is None:
                due = fault
                due.struck = True
                self.armed.remove(fault)
        return due

    async def _strike(
        self, fault: Armed, chunk: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Harm one chunk; returns whether the connection goes on."""
        rng = random.Random(fault.seed)
        place = rng.randrange(len(chunk))
        match fault.kind:
            case "cut":
                return False
            case "truncate":
                writer.write(chunk[:place])
                await writer.drain()
                return False
            case "delay":
                await asyncio.sleep(fault.seconds)
                writer.write(chunk)
            case "hold":
                self._open.clear()
                asyncio.get_running_loop().call_later(fault.seconds, self._open.set)
                await self._open.wait()
                writer.write(chunk)
            case "duplicate":
                writer.write(chunk + chunk)
            case "reorder":
                following = b""
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(REORDER_WAIT_S):
                        following = await reader.read(CHUNK_BYTES)
                writer.write(following + chunk if following else chunk[place:] + chunk[:place])
            case "drop":
                writer.write(chunk[:place] + chunk[place + fault.size :])
            case "flip":
                spoilt = bytearray(chunk)
                for index in range(place, min(place + fault.size, len(spoilt))):
                    spoilt[index] ^= fault.bits or 1 << rng.randrange(8)
                writer.write(bytes(spoilt))
        return True


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()  # what it still has to send is sent
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await writer.wait_closed()
    writer.transport.abort()
