"""The receiving side of the block wire: one I/O thread that verifies what arrives and feeds a sink.

Place in the request's path: between a listening channel and the sink of decode or prefill. Checks version,
checksum, order, bounds and totals; answers with CREDIT, ACK and NACK. Whether a manifest and its layers fit a
reservation is for the sink to check.
"""

from __future__ import annotations

import contextlib
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import structlog

from kvferry.shared.errors import (
    KvferryError,
    LeaseExpired,
    MalformedMessage,
    ProtocolMismatch,
    TransferFailed,
)
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.wire.channel import ListeningChannel, Peer, PeerLost, Received, SendResult
from kvferry.shared.wire.frames import (
    TransferCursor,
    decode_abort,
    decode_end,
    decode_layer,
    decode_manifest,
    decode_message,
    encode_header,
    encode_nack,
    peek_key,
)
from kvferry.shared.wire.messages import (
    MAX_PAYLOAD_BYTES,
    RESUME_S,
    BlockHeader,
    EndRecord,
    FrameHeader,
    LayerHeader,
    Manifest,
    MessageType,
    TransferKey,
)

BEAT_INTERVAL_S = 1.0
_TAKEOVER_S = 1.0
"""How long a sender that returns over another connection waits for the loss of its former one."""
_PROBE_S = 0.05
IDLE_TIMEOUT_S = 30.0
"""A transfer is aborted if nothing, not even a keepalive, arrives for this long."""
_CLOSE_TIMEOUT_S = 10.0

_log = structlog.get_logger(__name__)


class BlockSink(Protocol):
    """Takes what a server receives. Only the server's thread calls it, in order within each transfer.

    An error of `shared.errors` raised here fails that transfer only, and its sender is told.
    """

    def open(self, manifest: Manifest) -> None:
        """Take a manifest that has arrived.

        Raises: ProtocolMismatch, LeaseExpired (unknown or outdated key) or TransferFailed.
        """

    def begin_layer(self, key: TransferKey, header: LayerHeader) -> None:
        """Take the next layer's header.

        Raises: ProtocolMismatch or TransferFailed: its tensors are not the expected ones.
        """

    def write(self, header: BlockHeader, payload: memoryview) -> None:
        """Take the next bytes of a tensor; checksum, order and bounds are verified. The payload is a view of
        the transport's memory, valid only during the call."""

    def commit(self, end: EndRecord) -> None:
        """Commit the transfer: every byte that the layers' headers announced has been written. It is
        acknowledged when this has returned."""

    def abort(self, key: TransferKey, reason: str) -> None:
        """Release a failed or aborted transfer's resources. Never called after `commit` returned."""


@dataclass(slots=True, eq=False, kw_only=True)
class _IncomingTransfer:
    """A transfer being received.

    Attributes:
        granted_bytes: payload bytes written, as last reported to the sender.
        lost_at_s: when its connection was lost; None while it is connected.
        heard_at_s, told_at_s: when a message was last received, and last sent; monotonic seconds.
        successor: who sent the same manifest while it was connected, and when.
    """

    manifest: Manifest
    peer: Peer
    cursor: TransferCursor
    granted_bytes: int = 0
    lost_at_s: float | None = None
    heard_at_s: float = field(default_factory=time.monotonic)
    told_at_s: float = field(default_factory=time.monotonic)
    successor: tuple[Peer, float] | None = None


class BlockServer:
    """Listens for transfers at its channel's address and feeds a sink.

        MANIFEST ──sink.open──► LAYER, BLOCK ──sink.begin_layer, sink.write──► END ──sink.commit──► ACK
            │ refused           │  ▲ │ anything wrong, idle, peer not back in time, server closed
            ▼       peer lost ──┘  │ ▼
           NACK     MANIFEST again ┘ sink.abort, NACK; later blocks of it are late

    The constructor opens the channel; then the thread owns it and is the only caller of the sink. CREDIT
    reports the total written so far, once per batch of arrivals. It is repeated every BEAT_INTERVAL_S, which
    shows a sender that this side is alive, and this side whether the sender's connection is.
    """

    def __init__(
        self, channel: ListeningChannel, sink: BlockSink, *, on_late_block: Callable[[], None] | None = None
    ) -> None:
        """Open the channel. Args: on_late_block: called for each block that belongs to no open transfer.

        Raises: ConfigurationError: the address cannot be bound.
        """
        self._channel = channel
        self._sink = sink
        self._on_late_block = on_late_block or (lambda: None)
        self._transfers: dict[TransferKey, _IncomingTransfer] = {}
        self._committed: dict[TransferKey, _IncomingTransfer] = {}
        """Transfers of the last seconds, for senders that missed the ACK when they lost their connection."""
        self._stopping = False
        channel.open()
        self._thread = threading.Thread(target=self._run, name="kvferry-block-receiver", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """The address to put into tickets."""
        return self._channel.endpoint

    def close(self) -> None:
        """Abort the transfers that are not complete, and stop. Idempotent."""
        self._stopping = True
        self._channel.wake()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            with contextlib.closing(self._channel):
                try:
                    self._serve()
                finally:
                    for incoming in tuple(self._transfers.values()):
                        self._fail(incoming, TransferFailed("block receiver is closed", reason="closed"))
        except Exception:
            _log.exception("block receiver stopped")

    def _serve(self) -> None:
        next_sweep_s = 0.0
        wait_s = tick_s = min(BEAT_INTERVAL_S, IDLE_TIMEOUT_S / 4)
        while not self._stopping:
            for event in self._channel.poll(wait_s):
                if isinstance(event, Received):
                    self._on_received(event)
                else:
                    self._on_peer_lost(event)
            wait_s = tick_s
            for incoming in tuple(self._transfers.values()):
                if incoming.successor is not None:
                    self._probe(incoming)
                    wait_s = min(tick_s, _PROBE_S)
                elif incoming.cursor.payload_bytes > incoming.granted_bytes and incoming.lost_at_s is None:
                    self._grant(incoming)
            if time.monotonic() >= next_sweep_s:
                self._sweep()
                next_sweep_s = time.monotonic() + tick_s

    def _on_received(self, event: Received) -> None:
        """Handle a message. An invalid one fails its transfer if that was opened over the same connection."""
        try:
            header, payload = decode_message(event.frames)
            self._dispatch(event.peer, header, payload)
        except KvferryError as error:
            self._refuse(event, error)
        except Exception:
            _log.exception("block sink failed", key=peek_key(event.frames))
            self._refuse(event, TransferFailed("the receiver failed internally", reason="internal"))

    def _refuse(self, event: Received, error: KvferryError) -> None:
        key = peek_key(event.frames)
        if key is None:
            _log.warning("dropped a message without a key", error=error.message)
        elif (incoming := self._find(key, event.peer)) is not None:
            self._fail(incoming, error)
        else:
            self._send(event.peer, FrameHeader(type=MessageType.NACK, key=key), encode_nack(error))

    def _find(self, key: TransferKey, peer: Peer) -> _IncomingTransfer | None:
        """Return the open transfer, if it belongs to the peer's connection."""
        incoming = self._transfers.get(key)
        return incoming if incoming is not None and incoming.peer == peer else None

    def _dispatch(self, peer: Peer, header: FrameHeader, payload: Sequence[memoryview | bytes]) -> None:
        incoming = self._find(header.key, peer)
        if header.type is MessageType.MANIFEST:
            self._on_manifest(peer, header, payload[0])
            return
        if header.type is MessageType.ABORT:
            decode_abort(payload[0])
            if incoming is not None:
                self._drop(incoming, "aborted")
            return
        if incoming is None:
            if header.type is MessageType.BLOCK or (header.type is MessageType.LAYER and len(payload) > 1):
                self._on_late_block()
            raise LeaseExpired(
                f"no transfer {header.key.transfer_id:#x}, generation {header.key.generation} is open here",
                reason="unknown_transfer",
            )
        incoming.heard_at_s = time.monotonic()
        cursor = incoming.cursor
        match header.type:
            case MessageType.LAYER:
                layer, payload = decode_layer(payload[0]), payload[1:]
                cursor.pass_layer(header.sequence, layer, sum(map(len, payload)))
                self._sink.begin_layer(header.key, layer)
                self._write(incoming, header, payload)
            case MessageType.BLOCK:
                cursor.pass_block(header, sum(map(len, payload)))
                self._write(incoming, header, payload)
            case MessageType.END:
                self._sink.commit(_checked_end(incoming, payload[0]))
                del self._transfers[header.key]
                self._committed[header.key] = incoming
                acknowledged = FrameHeader(type=MessageType.ACK, key=header.key)
                self._send(peer, acknowledged)
                if incoming.successor is not None:  # the sender may have left this connection
                    self._send(incoming.successor[0], acknowledged)
            case MessageType.KEEPALIVE:
                pass
            case _:
                raise MalformedMessage(f"sender sent {header.type.name}", reason="malformed")

    def _write(
        self, incoming: _IncomingTransfer, header: FrameHeader, payload: Sequence[memoryview | bytes]
    ) -> None:
        for block, part in split(incoming.cursor, header, payload):
            self._sink.write(block, part)
        if incoming.cursor.payload_bytes - incoming.granted_bytes >= MAX_PAYLOAD_BYTES:
            self._grant(incoming)

    def _on_manifest(self, peer: Peer, header: FrameHeader, payload: memoryview | bytes) -> None:
        manifest = decode_manifest(payload)
        if manifest.key != header.key:
            raise MalformedMessage(
                f"the manifest of {manifest.key} was sent as {header.key}", reason="malformed"
            )
        committed = self._committed.get(header.key)
        if committed is not None and committed.manifest == manifest and committed.peer != peer:
            self._send(peer, FrameHeader(type=MessageType.ACK, key=header.key))
        elif (incoming := self._transfers.get(header.key)) is not None:
            self._resume(incoming, peer, manifest)
        else:
            self._sink.open(manifest)
            cursor = TransferCursor(manifest.num_layers)
            incoming = _IncomingTransfer(manifest=manifest, peer=peer, cursor=cursor)
            self._transfers[header.key] = incoming
            self._grant(incoming)

    def _resume(self, incoming: _IncomingTransfer, peer: Peer, manifest: Manifest) -> None:
        """Go on with a transfer over another connection if its own is lost, or will be within _TAKEOVER_S: a
        sender may notice a cut before its receiver does."""
        is_again = incoming.peer == peer and incoming.lost_at_s is None
        if is_again or manifest != incoming.manifest:
            raise _second_manifest(manifest)
        self._refuse_successor(incoming)
        incoming.successor = peer, time.monotonic()
        if incoming.lost_at_s is not None:
            self._lose(incoming)

    def _lose(self, incoming: _IncomingTransfer) -> None:
        """Handle the loss of a connection: the successor takes over, if there is one."""
        now_s = incoming.lost_at_s = time.monotonic()
        if incoming.successor is not None:
            incoming.peer, incoming.successor = incoming.successor[0], None
            incoming.lost_at_s, incoming.heard_at_s = None, now_s
            self._grant(incoming)

    def _probe(self, incoming: _IncomingTransfer) -> None:
        """Find out whether the connection is lost, which some channels report only when something is sent."""
        self._grant(incoming)
        if incoming.successor is not None and time.monotonic() - incoming.successor[1] > _TAKEOVER_S:
            self._refuse_successor(incoming)

    def _refuse_successor(self, incoming: _IncomingTransfer) -> None:
        if incoming.successor is not None:
            peer, incoming.successor = incoming.successor[0], None
            header = FrameHeader(type=MessageType.NACK, key=incoming.manifest.key)
            self._send(peer, header, encode_nack(_second_manifest(incoming.manifest)))

    def _on_peer_lost(self, event: PeerLost) -> None:
        for incoming in self._transfers.values():
            if incoming.successor is not None and incoming.successor[0] == event.peer:
                incoming.successor = None
            if incoming.peer == event.peer:
                self._lose(incoming)

    def _fail(self, incoming: _IncomingTransfer, error: KvferryError) -> None:
        self._drop(incoming, error.reason)
        header = FrameHeader(type=MessageType.NACK, key=incoming.manifest.key)
        self._send(incoming.peer, header, encode_nack(error))

    def _drop(self, incoming: _IncomingTransfer, reason: str) -> None:
        key = incoming.manifest.key
        del self._transfers[key]
        self._refuse_successor(incoming)
        try:
            self._sink.abort(key, reason)
        except Exception:
            _log.exception("block sink failed to abort", transfer_id=key.transfer_id)

    def _grant(self, incoming: _IncomingTransfer) -> None:
        """Report what is written, and which message is expected next."""
        cursor = incoming.cursor
        header = FrameHeader(
            type=MessageType.CREDIT,
            key=incoming.manifest.key,
            sequence=cursor.sequence,
            total_bytes=cursor.payload_bytes,
        )
        if self._send(incoming.peer, header) is SendResult.SENT:
            incoming.granted_bytes = cursor.payload_bytes
            incoming.told_at_s = time.monotonic()
        else:
            self._lose(incoming)

    def _sweep(self) -> None:
        """Abort idle transfers and those whose sender did not come back; repeat the credit of quiet ones."""
        now_s = time.monotonic()
        for incoming in tuple(self._transfers.values()):
            if now_s - incoming.heard_at_s > IDLE_TIMEOUT_S:
                message = f"nothing was received for {IDLE_TIMEOUT_S} s"
                self._fail(incoming, TransferFailed(message, reason="idle"))
            elif incoming.lost_at_s is not None:
                if now_s - incoming.lost_at_s > RESUME_S:
                    self._drop(incoming, "peer_lost")
            elif now_s - incoming.told_at_s > BEAT_INTERVAL_S:
                self._grant(incoming)
        for key, committed in tuple(self._committed.items()):
            if now_s - committed.heard_at_s > IDLE_TIMEOUT_S:
                del self._committed[key]

    def _send(self, peer: Peer, header: FrameHeader, payload: bytes = b"") -> SendResult:
        return self._channel.send(peer, (encode_header(header, (payload,)), payload))


def _second_manifest(manifest: Manifest) -> MalformedMessage:
    return MalformedMessage(f"a second manifest of {manifest.key} was received", reason="order")


def _checked_end(incoming: _IncomingTransfer, payload: memoryview | bytes) -> EndRecord:
    """Return the end record. Raises TransferFailed if something is missing ("incomplete") or its totals
    differ ("totals")."""
    end = decode_end(payload)
    incoming.cursor.check_complete()
    expected = (incoming.manifest.key, incoming.cursor.num_blocks, incoming.cursor.payload_bytes)
    if (end.key, end.num_blocks, end.payload_bytes) != expected:
        raise TransferFailed(
            f"end record has key, blocks, bytes {(end.key, end.num_blocks, end.payload_bytes)}; received"
            f" were {expected}",
            reason="totals",
        )
    return end


def split(
    cursor: TransferCursor, header: FrameHeader, frames: Sequence[memoryview | bytes]
) -> list[tuple[BlockHeader, memoryview]]:
    """Divide the bytes of the LAYER or BLOCK message that has just passed the cursor, by tensor."""
    start, parts = header.offset, []
    for raw in frames:
        frame = memoryview(raw)
        while frame.nbytes:
            tensor = bisect_right(cursor.starts, start) - 1
            begin, end = cursor.starts[tensor : tensor + 2]
            part = frame[: end - start]
            block = BlockHeader(key=header.key, layer=cursor.layer, tensor=tensor, offset=start - begin)
            parts.append((block, part))
            start += part.nbytes
            frame = frame[part.nbytes :]
    return parts


def model_fields(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of a manifest that name a model and its shapes."""
    return {
        "model_fingerprint": spec.fingerprint,
        "dtype": spec.dtype,
        "num_layers": spec.num_layers,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
    }


def check_manifest(manifest: Manifest, expected: Mapping[str, object]) -> None:
    """Require these values of some fields. Raises: ProtocolMismatch, reason "manifest_FIELD"."""
    for name, own in expected.items():
        if (sent := getattr(manifest, name)) != own:
            raise ProtocolMismatch(
                f"the manifest's {name} is {sent!r}; this worker expects {own!r}", reason=f"manifest_{name}"
            )


def part_key(key: TransferKey, first_head: int) -> TransferKey:
    """Name the part of a transfer that begins with a KV head; see "Parts" in `proto/BLOCKS.md`."""
    return replace(key, transfer_id=(key.transfer_id + first_head) % 2**64)
