"""A sender's channel that lets NIXL carry what is large, by one-sided writes into memory of the receiver.

Place in the request's path: above another channel, with `--transport nixl`. What is small, and what the two
ends tell each other (`packets.py`), goes through the channel below, in order, and so does everything where
the other end has no NIXL, or NIXL fails. A message is written into a ring of the receiver's, which this
sender alone knows, never into the arena: blocks are checked before they are copied there, under their
reservation's lock.
"""

from __future__ import annotations

import enum
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from kvferry.shared.wire.channel import (
    Channel,
    Peer,
    PeerLost,
    Received,
    SendResult,
    ignore_transport,
)
from kvferry.shared.wire.nixl.agent import NixlAgent, NixlFailed, RegisteredMemory, Remote
from kvferry.shared.wire.nixl.packets import (
    Packet,
    PacketKind,
    decode_offer,
    decode_place,
    encode_place,
    is_refusal,
    packet_of,
)
from kvferry.shared.wire.ring import RING_BYTES, Ring
from kvferry.shared.wire.zmq import IDLE_CONNECTION_S

ANSWER_S = 2.0
"""How long a receiver may take to offer a ring, and the first write into it."""
WRITE_S = 5.0
"""How long no write may end while some are in flight."""
REFUSED_S = 60.0
"""How long a receiver that NIXL did not reach is reached without it."""
IDLE_S = IDLE_CONNECTION_S * 2 / 3
"""After which a ring is given back: before the connection below is closed."""
TICK_S = 0.001
"""How often writes in flight are looked at."""
_SMALL_BYTES = 8 << 10
_MAX_QUEUED = 256
_PROBE_BYTES = 64

_log = structlog.get_logger(__name__)


class _State(enum.Enum):
    ASKING = "asking"
    PROBING = "probing"
    READY = "ready"
    WITHOUT = "without NIXL"


@dataclass(slots=True, eq=False, kw_only=True)
class _Queued:
    """A message on its way to the channel below.

    Attributes:
        frames: the whole message, for the channel below where NIXL fails.
        handle: of the write, until it is done; None for a message that needs none.
        place: where in the ring it is, and what to say when it is written.
    """

    frames: Sequence[memoryview | bytes]
    handle: Any = None
    number: int = 0
    place: bytes = b""


@dataclass(slots=True, eq=False, kw_only=True)
class _Link:
    """A receiver. Times are monotonic seconds.

    Attributes:
        ring: its random number, which names the ring in packets.
        since_s: when the last write ended, or none was in flight yet; of ASKING when it was asked.
        retry_s: until when NIXL is not tried again.
    """

    peer: Peer
    ring: int = field(default_factory=lambda: secrets.randbits(64))
    state: _State = _State.ASKING
    since_s: float = field(default_factory=time.monotonic)
    used_s: float = field(default_factory=time.monotonic)
    retry_s: float = 0.0
    memory: RegisteredMemory | None = None
    remote: Remote | None = None
    places: Ring = field(default_factory=lambda: Ring(RING_BYTES))
    queue: deque[_Queued] = field(default_factory=deque)
    next_number: int = 0

    @property
    def is_writing(self) -> bool:
        return any(queued.handle is not None for queued in self.queue)


class NixlConnectingChannel:
    """A sender's channel. Messages to one receiver keep their order whichever way they take.

        ASKING ──offer──► PROBING ──first write done──► READY ──idle──► forgotten
           └─ refused, no answer ─┴─ a write fails, or none ends in time ─► WITHOUT ──REFUSED_S──► forgotten

    A message's bytes are copied into this end's ring, which is as large as the receiver's, and written to the
    same place there. When the write is done the receiver is told where they are, over the channel below. What
    is written but not told when NIXL fails is sent whole over the channel below, so no transfer notices.
    """

    def __init__(
        self, below: Channel, agent: NixlAgent, *, on_connected: Callable[[str], None] = ignore_transport
    ) -> None:
        """Args: on_connected: gets "nixl" or "network" when a receiver's transport is known."""
        self._below = below
        self._agent = agent
        self._on_connected = on_connected
        self._links: dict[Peer, _Link] = {}
        self._told: dict[Peer, str] = {}

    def open(self) -> None:
        self._below.open()

    def send(self, peer: Peer, frames: Sequence[memoryview | bytes]) -> SendResult:
        link = self._links.get(peer)
        if link is None:
            return self._ask(peer)
        link.used_s = time.monotonic()
        if link.state in (_State.ASKING, _State.PROBING) or len(link.queue) >= _MAX_QUEUED:
            return SendResult.BLOCKED
        sizes = tuple(map(len, frames))
        if link.state is _State.READY and sum(sizes) > _SMALL_BYTES:
            return self._write(link, frames, sizes)
        if not link.queue:
            return self._below.send(peer, frames)
        link.queue.append(_Queued(frames=frames))
        return SendResult.SENT

    def poll(self, timeout_s: float) -> Sequence[Received | PeerLost]:
        if any(link.is_writing for link in self._links.values()):
            timeout_s = min(timeout_s, TICK_S)
        events: list[Received | PeerLost] = []
        for event in self._below.poll(timeout_s):
            if isinstance(event, PeerLost):
                self._on_lost(event.peer)
                events.append(event)
            elif not self._is_for_me(event):
                events.append(event)
        for link in tuple(self._links.values()):
            self._advance(link, time.monotonic())
        return events

    def wake(self) -> None:
        self._below.wake()

    def close(self) -> None:
        for link in tuple(self._links.values()):
            self._let_go(link)
        self._links.clear()
        self._below.close()

    # ---- beginning ---------------------------------------------------------------------------------------

    def _ask(self, peer: Peer) -> SendResult:
        link = _Link(peer=peer)
        result = self._below.send(peer, Packet(kind=PacketKind.ASK, ring=link.ring).frames())
        if result is SendResult.SENT:
            self._links[peer] = link
            return SendResult.BLOCKED
        return result

    def _is_for_me(self, event: Received) -> bool:
        link = self._links.get(event.peer)
        try:
            packet = packet_of(event.frames)
            if packet is None:
                refused = link is not None and is_refusal(event.frames, link.ring)
                if refused and link is not None and link.state is _State.ASKING:
                    self._give_up(link, "the receiver does not use NIXL")
                return refused
            if link is not None and packet.ring == link.ring:
                self._on_packet(link, packet)
        except (ValueError, NixlFailed) as error:
            if link is not None:
                self._give_up(link, str(error))
        return True

    def _on_packet(self, link: _Link, packet: Packet) -> None:
        if packet.kind is PacketKind.OFFER and link.state is _State.ASKING:
            offer = decode_offer(packet.rest)
            if offer.size_bytes != RING_BYTES:
                raise ValueError(f"its ring has {offer.size_bytes} bytes; {RING_BYTES} are expected")
            link.memory = RegisteredMemory(self._agent, RING_BYTES)
            link.remote = Remote(
                agent=self._agent.connect(offer.metadata),
                memory=offer.memory,
                device=offer.device,
                address=offer.address,
            )
            # The first write shows whether the network lets writes pass, before a transfer depends on it.
            handle = self._agent.write(link.memory, link.remote, 0, _PROBE_BYTES)
            link.state, link.since_s = _State.PROBING, time.monotonic()
            link.queue.append(_Queued(frames=(), handle=handle, place=encode_place(0)))
        elif packet.kind is PacketKind.REFUSE and link.state is _State.ASKING:
            self._give_up(link, packet.rest.decode(errors="replace"))
        elif packet.kind is PacketKind.READ:
            freed, _ = decode_place(packet.rest)
            if not link.places.freed <= freed <= link.places.used:
                raise ValueError(f"position {freed} was reported as read")
            link.places.freed = freed

    # ---- writing -----------------------------------------------------------------------------------------

    def _write(self, link: _Link, frames: Sequence[memoryview | bytes], sizes: tuple[int, ...]) -> SendResult:
        assert link.memory is not None
        assert link.remote is not None
        num_bytes = sum(sizes)
        position = link.places.place(num_bytes)
        if position is None:
            return SendResult.BLOCKED
        number = link.next_number + 1
        writing = Packet(kind=PacketKind.WRITING, ring=link.ring, number=number)
        result = self._below.send(link.peer, writing.frames())
        if result is not SendResult.SENT:
            if result is SendResult.LOST:
                self._on_lost(link.peer)
            return result
        link.next_number = number
        start = done = position % RING_BYTES
        for frame in frames:
            # numpy lets other threads run meanwhile, unlike the copy of a memoryview.
            link.memory.bytes[done : done + len(frame)] = memoryview(frame)
            done += len(frame)
        if not link.is_writing:
            link.since_s = time.monotonic()
        link.places.used = position + num_bytes
        queued = _Queued(frames=frames, number=number, place=encode_place(position, sizes))
        link.queue.append(queued)
        try:
            queued.handle = self._agent.write(link.memory, link.remote, start, num_bytes)
        except NixlFailed as error:
            self._give_up(link, str(error))
        return SendResult.SENT

    def _advance(self, link: _Link, now_s: float) -> None:
        """Notice ended writes, tell the receiver of them in order, and give up what takes too long."""
        if link.state is _State.ASKING:
            if now_s - link.since_s > ANSWER_S:
                self._give_up(link, f"no ring was offered within {ANSWER_S} s")
            return
        try:
            self._check_writes(link, now_s)
        except NixlFailed as error:
            self._give_up(link, str(error))
        self._flush(link)
        if link.queue:
            return
        if link.state is _State.PROBING:
            link.state = _State.READY
            self._tell(link.peer, "nixl", "")
        is_idle = link.state is _State.READY and now_s - link.used_s > IDLE_S
        if is_idle and self._below.send(link.peer, _end(link, is_clean=True)) is not SendResult.BLOCKED:
            self._let_go(link)
        if is_idle or (link.state is _State.WITHOUT and now_s > link.retry_s):
            del self._links[link.peer]

    def _check_writes(self, link: _Link, now_s: float) -> None:
        for queued in link.queue:
            if queued.handle is not None and self._agent.is_written(queued.handle):
                queued.handle = None
                link.since_s = now_s
        limit_s = ANSWER_S if link.state is _State.PROBING else WRITE_S
        if link.is_writing and now_s - link.since_s > limit_s:
            raise NixlFailed(f"no write ended within {limit_s} s")

    def _flush(self, link: _Link) -> None:
        """Pass on what is ready, up to the first message that is not."""
        while link.queue and link.queue[0].handle is None:
            queued = link.queue[0]
            frames = queued.frames
            if queued.place:
                frames = Packet(
                    kind=PacketKind.WRITTEN, ring=link.ring, number=queued.number, rest=queued.place
                ).frames()
            if self._below.send(link.peer, frames) is not SendResult.SENT:
                return  # `poll` of the channel below returns when there is room, or the receiver is lost
            link.queue.popleft()

    # ---- ending ------------------------------------------------------------------------------------------

    def _give_up(self, link: _Link, reason: str) -> None:
        """Go on without NIXL. What the receiver was not told of goes to it whole."""
        has_ring = link.state in (_State.PROBING, _State.READY)
        self._let_go(link)
        link.state, link.retry_s = _State.WITHOUT, time.monotonic() + REFUSED_S
        for queued in tuple(link.queue):
            queued.place = b""
            if not queued.frames:
                link.queue.remove(queued)
        if has_ring:
            link.queue.appendleft(_Queued(frames=_end(link, is_clean=False)))
        self._tell(link.peer, "network", reason)

    def _let_go(self, link: _Link) -> None:
        """Give up the writes in flight and the ring's memory."""
        was_writing = link.is_writing
        for queued in link.queue:
            if queued.handle is not None:
                self._agent.abandon(queued.handle)
                queued.handle = None
        if link.remote is not None:
            self._agent.disconnect(link.remote.agent)
            link.remote = None
        if link.memory is not None:
            if was_writing:
                link.memory.retire()
            else:
                link.memory.free()
            link.memory = None

    def _on_lost(self, peer: Peer) -> None:
        link = self._links.get(peer)
        if link is None:
            return
        self._let_go(link)
        link.queue.clear()
        if link.state is not _State.WITHOUT:
            del self._links[peer]

    def _tell(self, peer: Peer, transport: str, reason: str) -> None:
        """Say, and count, how blocks go to a receiver where that is new."""
        if self._told.get(peer) == transport:
            return
        self._told[peer] = transport
        self._on_connected(transport)
        if transport == "nixl":
            _log.info("blocks are sent through NIXL", endpoint=peer.decode())
        else:
            _log.warning("blocks are sent over the network, not NIXL", endpoint=peer.decode(), reason=reason)


def _end(link: _Link, *, is_clean: bool) -> tuple[bytes, bytes]:
    return Packet(kind=PacketKind.END, ring=link.ring, number=int(not is_clean)).frames()
