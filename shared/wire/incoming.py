"""One transfer being received: what must come next, and what has been told to its sender.

Place in the request's path: `receiver.py` asks it about every block and the end record before the sink sees
them. Holds no bytes.
"""

from __future__ import annotations

from kvferry.shared.errors import TransferFailed
from kvferry.shared.wire.channel import Peer
from kvferry.shared.wire.frames import FrameHeader
from kvferry.shared.wire.layout import SIZING_SECTIONS, SectionCursor
from kvferry.shared.wire.messages import BlockHeader, EndRecord, Manifest
from kvferry.shared.wire.records import decode_end


class IncomingTransfer:
    """Expected position of an open transfer. Used by the receiver's thread alone.

    Attributes:
        written_bytes: payload bytes that the sink has; granted_bytes: as last told to the sender.
        heard_at_s, told_at_s: when a message last came, when one last went; monotonic seconds.
    """

    def __init__(self, manifest: Manifest, *, peer: Peer, now_s: float) -> None:
        self.key = manifest.key
        self.peer = peer
        self.written_bytes = 0
        self.granted_bytes = 0
        self.heard_at_s = now_s
        self.told_at_s = now_s
        self._cursor = SectionCursor(manifest)
        self._num_blocks = 0

    @property
    def ungranted_bytes(self) -> int:
        return self.written_bytes - self.granted_bytes

    def accept_block(self, header: FrameHeader, payload: memoryview) -> BlockHeader:
        """Raises TransferFailed ("order", "size") if it is not the block that must come next."""
        if header.sequence != self._num_blocks:
            raise TransferFailed(
                f"block {header.sequence} came; block {self._num_blocks} is expected", reason="order"
            )
        block = header.block()
        self._cursor.advance(
            layer=block.layer,
            section=block.section,
            total_bytes=block.section_bytes,
            offset=block.offset,
            num_bytes=payload.nbytes,
            layout=payload if block.section in SIZING_SECTIONS else b"",
        )
        self._num_blocks += 1
        return block

    def accept_end(self, payload: memoryview) -> EndRecord:
        """Raises TransferFailed ("incomplete") if not everything has come, or other totals were sent."""
        end = decode_end(payload)
        if not self._cursor.complete:
            raise TransferFailed(f"end came where {self._cursor.describe()} is expected", reason="incomplete")
        expected = (self.key, self._num_blocks, self.written_bytes)
        if (end.key, end.num_blocks, end.payload_bytes) != expected:
            raise TransferFailed(
                f"end says key, blocks, bytes {(end.key, end.num_blocks, end.payload_bytes)};"
                f" {expected} came",
                reason="totals",
            )
        return end
