"""The seams of the block wire: senders, outgoing transfers, and the sinks that receivers feed.

One sender and one receiver state machine (credits, order, checksums, acknowledgements) run over any channel;
ZeroMQ and in-process channels differ only in how frames travel. All methods may be called from any thread.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kvferry.shared.control.messages import Ticket
from kvferry.shared.wire.messages import BlockHeader, EndRecord, Manifest, Section, TransferKey


class OutgoingTransfer(Protocol):
    """One transfer being sent. Blocks are kept until the receiver has acknowledged the whole."""

    def send(self, *, layer: int, section: Section, tensor: Tensor) -> None:
        """Queue a section (contiguous tensor, any device; copied to the host if it is not there). Waits
        while the transfer is out of credit and the host buffer is full.

        Raises:
            TransferFailed: the peer refused, vanished or stayed silent past the timeout.
            Cancelled: `abort` was called.
        """
        ...

    def finish(self, end: EndRecord) -> None:
        """Queue the end record. `num_blocks` and `payload_bytes` are filled in by the transfer."""
        ...

    def wait(self, timeout_s: float) -> float:
        """Wait for the acknowledgement; returns seconds from the first block's sending to it. Raises as
        `send`."""
        ...

    def abort(self, reason: str) -> None:
        """Give up; tells the receiver, frees the buffer. Idempotent; no effect once acknowledged."""
        ...

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """Payload bytes sent so far by kind: rows, index, codes, scales, state, manifest (manifest and
        end record)."""
        ...


class BlockSender(Protocol):
    """Opens transfers to any endpoint."""

    def open(self, ticket: Ticket, manifest: Manifest, *, timeout_s: float) -> OutgoingTransfer: ...

    def close(self) -> None: ...


class BlockSink(Protocol):
    """Where a receiver puts what arrives. Called from the receiver's thread, in order for any one transfer,
    never concurrently. An error of `shared.errors` raised here fails that transfer alone, and is told to
    its sender."""

    def open(self, manifest: Manifest) -> None:
        """A manifest came. Raise ProtocolMismatch, LeaseExpired (unknown or outdated key) or
        TransferFailed."""
        ...

    def write(self, header: BlockHeader, payload: memoryview) -> None:
        """A verified block came (checksum, order and bounds against the manifest are checked already)."""
        ...

    def commit(self, end: EndRecord) -> None:
        """Every byte of every section in the manifest's order has been written. After this returns the
        sender is acknowledged."""
        ...

    def abort(self, key: TransferKey, reason: str) -> None:
        """The transfer failed or was given up; free what it held. Never called after `commit` returned."""
        ...


class BlockServer(Protocol):
    """Listens for transfers and feeds a sink."""

    @property
    def endpoint(self) -> str:
        """The address to put into tickets."""
        ...

    def close(self) -> None: ...
