"""A receiver's channel that offers memory to senders which use NIXL.

Place in the request's path: above another channel, with `--transport nixl`; see `connecting.py`. A sender's
messages are read where it wrote them, in a ring of its own; the block server checks them before anything is
copied into the arena.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from kvferry.shared.wire.channel import ListeningChannel, Peer, PeerLost, Received, SendResult
from kvferry.shared.wire.nixl.agent import NixlAgent, NixlFailed, RegisteredMemory
from kvferry.shared.wire.nixl.connecting import TICK_S, WRITE_S
from kvferry.shared.wire.nixl.packets import (
    Offer,
    Packet,
    PacketKind,
    cut,
    decode_place,
    encode_offer,
    encode_place,
    packet_of,
)
from kvferry.shared.wire.ring import RING_BYTES

MAX_RINGS = 64
_PROGRESS_S = 4 * WRITE_S
"""How long a write of whose end nothing is heard is progressed: its sender may be lost."""
_BEAT_S = 10.0

_log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class _IncomingRing:
    """A sender's ring.

    Attributes:
        writing, written: the last write that began, and that ended, as the sender said.
        busy_s: until when to progress writes although the sender says nothing more.
        told_s: when the sender was last told something.
    """

    number: int
    memory: RegisteredMemory
    view: memoryview
    read: int = 0
    reported: int = 0
    writing: int = 0
    written: int = -1
    busy_s: float
    told_s: float


class NixlListeningChannel:
    """A receiver's channel: a ring for each sender that asks, each registered by itself.

    A ring is given back when its sender says that nothing is in flight. If the sender is lost, or gave a
    write up, its addresses are never used again; see `RegisteredMemory`.
    """

    def __init__(self, below: ListeningChannel, agent: NixlAgent) -> None:
        self._below = below
        self._agent = agent
        self._rings: dict[Peer, _IncomingRing] = {}
        self._retiring: list[RegisteredMemory] = []  # at the next poll: until then the caller may read them

    @property
    def endpoint(self) -> str:
        return self._below.endpoint

    def open(self) -> None:
        self._below.open()

    def send(self, peer: Peer, frames: Sequence[memoryview | bytes]) -> SendResult:
        result = self._below.send(peer, frames)
        if result is SendResult.LOST:
            self._drop(peer, is_clean=False)
        return result

    def poll(self, timeout_s: float) -> Sequence[Received | PeerLost]:
        now_s = time.monotonic()
        for peer in tuple(self._rings):
            self._report(peer, now_s)
        self._retire()
        if any(ring.writing > ring.written and now_s < ring.busy_s for ring in self._rings.values()):
            self._agent.progress()
            timeout_s = min(timeout_s, TICK_S)
        events: list[Received | PeerLost] = []
        for event in self._below.poll(timeout_s):
            if isinstance(event, PeerLost):
                self._drop(event.peer, is_clean=False)
                events.append(event)
                continue
            try:
                packet = packet_of(event.frames)
                frames = self._on_packet(event.peer, packet) if packet is not None else event.frames
            except ValueError as error:
                _log.warning("dropped a packet of a sender that uses NIXL", error=str(error))
                frames = None
            if frames is not None:
                events.append(Received(event.peer, frames))
        return events

    def wake(self) -> None:
        self._below.wake()

    def close(self) -> None:
        for peer in tuple(self._rings):
            self._drop(peer, is_clean=False)
        self._retire()
        self._below.close()

    def _on_packet(self, peer: Peer, packet: Packet) -> Sequence[memoryview] | None:
        """The message that a packet announces; None if it announces none. Raises: ValueError."""
        if packet.kind is PacketKind.ASK:
            self._offer(peer, packet.ring)
            return None
        ring = self._rings.get(peer)
        if ring is None or ring.number != packet.ring:
            raise ValueError(f"a packet {packet.kind.name} names ring {packet.ring:#x}, which is not open")
        if packet.kind is PacketKind.END:
            self._drop(peer, is_clean=not packet.number)
        elif packet.kind is PacketKind.WRITING:
            ring.writing = packet.number
            ring.busy_s = time.monotonic() + _PROGRESS_S
        elif packet.kind is PacketKind.WRITTEN:
            ring.written = packet.number
            position, sizes = decode_place(packet.rest)
            frames = cut(ring.view, position, sizes)
            ring.read = max(ring.read, position + sum(sizes))
            return frames or None
        else:
            raise ValueError(f"a sender sent {packet.kind.name}")
        return None

    def _offer(self, peer: Peer, number: int) -> None:
        if peer in self._rings:
            self._drop(peer, is_clean=False)
        try:
            if len(self._rings) >= MAX_RINGS:
                raise NixlFailed(f"the receiver has {MAX_RINGS} rings already")
            memory = RegisteredMemory(self._agent, RING_BYTES)
            offer = Offer(
                metadata=memory.offer(),
                memory="DRAM",
                device=0,
                address=memory.address,
                size_bytes=RING_BYTES,
            )
        except NixlFailed as error:
            _log.warning("NIXL is not used with a sender", error=str(error))
            refusal = Packet(kind=PacketKind.REFUSE, ring=number, rest=str(error).encode()[:1024])
            self._below.send(peer, refusal.frames())
            return
        now_s = time.monotonic()
        view = memory.bytes.data.toreadonly()
        self._rings[peer] = _IncomingRing(
            number=number, memory=memory, view=view, busy_s=now_s + _PROGRESS_S, told_s=now_s
        )
        self.send(peer, Packet(kind=PacketKind.OFFER, ring=number, rest=encode_offer(offer)).frames())

    def _report(self, peer: Peer, now_s: float) -> None:
        """Tell a sender what was read, and from time to time something, which shows whether it is lost."""
        ring = self._rings[peer]
        if ring.read - ring.reported >= RING_BYTES // 4 or now_s - ring.told_s > _BEAT_S:
            ring.reported, ring.told_s = ring.read, now_s
            self.send(
                peer, Packet(kind=PacketKind.READ, ring=ring.number, rest=encode_place(ring.read)).frames()
            )

    def _drop(self, peer: Peer, *, is_clean: bool) -> None:
        ring = self._rings.pop(peer, None)
        if ring is None:
            return
        if is_clean:
            ring.memory.free()
        else:
            self._retiring.append(ring.memory)

    def _retire(self) -> None:
        for memory in self._retiring:
            memory.retire()
        self._retiring.clear()
