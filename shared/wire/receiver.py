"""The receiving side of the block wire: one I/O thread that verifies what arrives and feeds a sink.

Place in the request's path: between a listening channel and the sink of decode or prefill. Checks version,
checksum, order, bounds and totals; answers with CREDIT, ACK and NACK. Whether a manifest and its layers fit a
reservation is for the sink to check.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from kvferry.shared.errors import (
    ConfigurationError,
    KvferryError,
    LeaseExpired,
    ProtocolMismatch,
    TransferFailed,
)
from kvferry.shared.wire.channel import ListeningChannel, Peer, PeerLost, Received, SendResult
from kvferry.shared.wire.frames import (
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
    BlockHeader,
    EndRecord,
    FrameHeader,
    LayerHeader,
    Manifest,
    MessageType,
    TransferCursor,
    TransferKey,
)

BEAT_INTERVAL_S = 1.0
DEFAULT_IDLE_TIMEOUT_S = 30.0
_START_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 10.0

_log = structlog.get_logger(__name__)


class BlockSink(Protocol):
    """Takes what a server receives. Only the server's thread calls it, in order within each transfer.

    An error of `shared.errors` raised here fails that transfer only, and its sender is told.
    """

    def open(self, manifest: Manifest) -> None:
        """A manifest has arrived.

        Raises: ProtocolMismatch, LeaseExpired (unknown or outdated key) or TransferFailed.
        """
        ...

    def begin_layer(self, key: TransferKey, header: LayerHeader) -> None:
        """The next layer's header has arrived.

        Raises: ProtocolMismatch or TransferFailed: its tensors are not the expected ones.
        """
        ...

    def write(self, header: BlockHeader, payload: memoryview) -> None:
        """The next bytes of a tensor have arrived; checksum, order and bounds are verified. The payload is a
        view of the transport's memory, valid only during the call."""
        ...

    def commit(self, end: EndRecord) -> None:
        """Every byte that the layers' headers announced has been written. When this has returned, the
        transfer is acknowledged."""
        ...

    def abort(self, key: TransferKey, reason: str) -> None:
        """The transfer failed or was aborted; release its resources. Never called after `commit` returned."""
        ...


@dataclass(slots=True, eq=False, kw_only=True)
class _IncomingTransfer:
    """A transfer being received.

    Attributes:
        granted_bytes: payload bytes written, as last reported to the sender.
        heard_at_s, told_at_s: when a message last came, when one was last sent; monotonic seconds.
    """

    key: TransferKey
    peer: Peer
    cursor: TransferCursor
    heard_at_s: float
    told_at_s: float
    granted_bytes: int = 0


class BlockServer:
    """Listens for transfers at its channel's address and feeds a sink.

        MANIFEST ──sink.open──► LAYER, BLOCK ──sink.begin_layer, sink.write──► END ──sink.commit──► ACK
            │ refused              │ anything wrong, idle, peer gone, server closed
            ▼                      ▼
           NACK                 sink.abort, NACK; later blocks of it are late

    The thread owns the channel and is the only caller of the sink. CREDIT reports the total written so far,
    once per batch of arrivals. It is repeated every BEAT_INTERVAL_S, which shows a sender that this side is
    alive, and this side whether the sender's connection is.
    """

    def __init__(
        self,
        channel: ListeningChannel,
        sink: BlockSink,
        *,
        idle_timeout_s: float = DEFAULT_IDLE_TIMEOUT_S,
        on_late_block: Callable[[], None] | None = None,
        on_failed: Callable[[str], None] | None = None,
    ) -> None:
        """
        Args:
            idle_timeout_s: a transfer is aborted if nothing, not even a keepalive, arrives for this long.
            on_late_block: called for each block that belongs to no open transfer.
            on_failed: called with the reason of each transfer refused or broken.

        Raises:
            ConfigurationError: the address cannot be bound.
        """
        self._channel = channel
        self._sink = sink
        self._idle_timeout_s = idle_timeout_s
        self._on_late_block = on_late_block or (lambda: None)
        self._on_failed = on_failed or (lambda reason: None)
        self._transfers: dict[TransferKey, _IncomingTransfer] = {}
        self._stopping = False
        self._started = threading.Event()
        self._start_error: ConfigurationError | None = None
        self._thread = threading.Thread(target=self._run, name="kvferry-block-receiver", daemon=True)
        self._thread.start()
        if not self._started.wait(_START_TIMEOUT_S):
            raise ConfigurationError(f"block receiver did not start within {_START_TIMEOUT_S} s")
        if self._start_error is not None:
            raise self._start_error

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
            self._channel.open()
        except ConfigurationError as error:
            self._start_error = error
            return
        finally:
            self._started.set()
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
        tick_s = min(BEAT_INTERVAL_S, self._idle_timeout_s / 4)
        while not self._stopping:
            for event in self._channel.poll(tick_s):
                if isinstance(event, Received):
                    self._on_received(event)
                else:
                    self._on_peer_lost(event)
            for incoming in tuple(self._transfers.values()):
                if incoming.cursor.payload_bytes > incoming.granted_bytes:
                    self._grant(incoming)
            if time.monotonic() >= next_sweep_s:
                self._sweep()
                next_sweep_s = time.monotonic() + tick_s

    def _on_received(self, event: Received) -> None:
        """An invalid message fails its transfer if that was opened over the same connection."""
        key, peer = peek_key(event.frames), event.peer
        incoming = self._transfers.get(key) if key is not None else None
        if incoming is not None and incoming.peer != peer:
            incoming = None
        error: KvferryError
        try:
            header, payload = decode_message(event.frames)
            self._dispatch(peer, incoming, header, payload)
            return
        except KvferryError as refused:
            error = refused
        except Exception:
            _log.exception("block sink failed", key=key)
            error = TransferFailed("the receiver failed internally", reason="internal")
        if key is None:
            _log.warning("dropped a message without a key", error=error.message)
            self._on_failed(error.reason)
        elif incoming is not None:
            self._fail(incoming, error)
        else:
            if error.reason != "unknown_transfer":
                self._on_failed(error.reason)
            self._send(peer, FrameHeader(type=MessageType.NACK, key=key), encode_nack(error))

    def _dispatch(
        self,
        peer: Peer,
        incoming: _IncomingTransfer | None,
        header: FrameHeader,
        payload: Sequence[memoryview | bytes],
    ) -> None:
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
                self._send(peer, FrameHeader(type=MessageType.ACK, key=header.key))
            case MessageType.KEEPALIVE:
                pass
            case _:
                raise ProtocolMismatch(f"sender sent {header.type.name}", reason="malformed")

    def _write(
        self, incoming: _IncomingTransfer, header: FrameHeader, payload: Sequence[memoryview | bytes]
    ) -> None:
        for block, part in incoming.cursor.split(header, payload):
            self._sink.write(block, part)
        if incoming.cursor.payload_bytes - incoming.granted_bytes >= MAX_PAYLOAD_BYTES:
            self._grant(incoming)

    def _on_manifest(self, peer: Peer, header: FrameHeader, payload: memoryview | bytes) -> None:
        if header.key in self._transfers:
            raise ProtocolMismatch(f"a second manifest came for {header.key}", reason="order")
        manifest = decode_manifest(payload)
        if manifest.key != header.key:
            raise ProtocolMismatch(f"manifest of {manifest.key} came as {header.key}", reason="malformed")
        self._sink.open(manifest)
        now_s = time.monotonic()
        self._transfers[header.key] = _IncomingTransfer(
            key=header.key,
            peer=peer,
            cursor=TransferCursor(manifest.num_layers),
            heard_at_s=now_s,
            told_at_s=now_s,
        )

    def _on_peer_lost(self, event: PeerLost) -> None:
        for incoming in tuple(self._transfers.values()):
            if incoming.peer == event.peer:
                self._drop(incoming, "peer_lost")

    def _fail(self, incoming: _IncomingTransfer, error: KvferryError) -> None:
        self._drop(incoming, error.reason)
        header = FrameHeader(type=MessageType.NACK, key=incoming.key)
        self._send(incoming.peer, header, encode_nack(error))

    def _drop(self, incoming: _IncomingTransfer, reason: str) -> None:
        del self._transfers[incoming.key]
        try:
            self._sink.abort(incoming.key, reason)
        except Exception:
            _log.exception("block sink failed to abort", transfer_id=incoming.key.transfer_id)
        self._on_failed(reason)

    def _grant(self, incoming: _IncomingTransfer) -> None:
        written_bytes = incoming.cursor.payload_bytes
        header = FrameHeader(type=MessageType.CREDIT, key=incoming.key, total_bytes=written_bytes)
        if self._send(incoming.peer, header) is SendResult.SENT:
            incoming.granted_bytes = written_bytes
            incoming.told_at_s = time.monotonic()
        else:
            self._drop(incoming, "peer_lost")

    def _sweep(self) -> None:
        """Abort idle transfers; repeat the credit of quiet ones."""
        now_s = time.monotonic()
        for incoming in tuple(self._transfers.values()):
            if now_s - incoming.heard_at_s > self._idle_timeout_s:
                message = f"nothing came for {self._idle_timeout_s} s"
                self._fail(incoming, TransferFailed(message, reason="idle"))
            elif now_s - incoming.told_at_s > BEAT_INTERVAL_S:
                self._grant(incoming)

    def _send(self, peer: Peer, header: FrameHeader, payload: bytes = b"") -> SendResult:
        return self._channel.send(peer, (encode_header(header, (payload,)), payload))


def _checked_end(incoming: _IncomingTransfer, payload: memoryview | bytes) -> EndRecord:
    """The end record. Raises TransferFailed if something is missing ("incomplete") or its totals differ
    ("totals")."""
    end = decode_end(payload)
    incoming.cursor.check_complete()
    expected = (incoming.key, incoming.cursor.num_blocks, incoming.cursor.payload_bytes)
    if (end.key, end.num_blocks, end.payload_bytes) != expected:
        raise TransferFailed(
            f"end says key, blocks, bytes {(end.key, end.num_blocks, end.payload_bytes)}; {expected} came",
            reason="totals",
        )
    return end
