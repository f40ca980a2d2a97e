"""Puts one packed layer's blocks into its zone of a sequence's arena bytes; refuses what no packer writes.

Called by `cache_writer.py` under the sequence's lock, in the order of the sections: LAYOUT says where the
others lie. Attends on nothing.
"""

from __future__ import annotations

from torch import Tensor

from kvferry.kernels.packed import PackedLayer, PackedLayout, check_packed_layer, view_packed_layer
from kvferry.services.decode.arena_copier import ArenaCopier
from kvferry.shared.errors import TransferFailed
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.wire.messages import BlockHeader, Section
from kvferry.shared.wire.packed_sections import KIND_SECTIONS, decode_layout, layout_section_bytes


class PackedLayerWriter:
    """Writes one layer.

        LAYOUT bytes ──all of them──► layout ──bytes written──► ... ──as many as it says──► checked: `packed`

    Args:
        layer: its index, for messages.
        zone: uint8, room for the layer at its largest.
        num_prompt_tokens: T; kept positions lie in [0, T).
    """

    def __init__(
        self, spec: ModelSpec, layer: int, zone: Tensor, copier: ArenaCopier, *, num_prompt_tokens: int
    ) -> None:
        self.packed: PackedLayer | None = None
        self._spec = spec
        self._layer = layer
        self._zone = zone
        self._copier = copier
        self._num_prompt_tokens = num_prompt_tokens
        self._counts = bytearray()
        self._layout: PackedLayout | None = None
        self._written_bytes = 0

    def write(self, header: BlockHeader, payload: memoryview) -> None:
        """Place one block.

        Raises:
            ProtocolMismatch: the layer is packed by another version.
            TransferFailed: the block lies outside its section, or completes a layer that no packer writes.
        """
        if header.section is Section.LAYOUT:
            self._write_layout(header, payload)
            return
        if self._layout is None or header.section not in KIND_SECTIONS or self.packed is not None:
            raise self._failed(f"{header.section.name} came where it cannot be", "order")
        start, size_bytes = self._layout.kinds[KIND_SECTIONS[header.section]]
        end = header.offset + payload.nbytes
        # In the layer's own order and without gaps, so that a count of bytes says what has come.
        if header.section_bytes != size_bytes or end > size_bytes:
            raise self._failed(
                f"{header.section.name}: bytes {header.offset} to {end} of {header.section_bytes} came; the "
                f"layout says {size_bytes}",
                "size",
            )
        if start + header.offset != self._written_bytes:
            raise self._failed(f"{header.section.name}: offset {header.offset} came out of order", "order")
        self._copier.load(payload)
        self._copier.copy(self._zone[self._written_bytes : self._written_bytes + payload.nbytes], 0)
        self._written_bytes += payload.nbytes
        self._complete(self._layout)

    def finish(self) -> PackedLayer:
        """The layer, all of it written and checked.

        Raises:
            TransferFailed: bytes are missing.
        """
        if self.packed is None:
            raise self._failed("not all of its packed bytes came", "incomplete")
        return self.packed

    def _write_layout(self, header: BlockHeader, payload: memoryview) -> None:
        size_bytes = layout_section_bytes(self._spec.num_kv_heads)
        if header.offset != len(self._counts) or header.offset + payload.nbytes > size_bytes:
            raise self._failed(
                f"LAYOUT: {payload.nbytes} bytes at {header.offset} came; {len(self._counts)} of "
                f"{size_bytes} have been written",
                "order",
            )
        self._counts += payload
        if len(self._counts) == size_bytes:
            self._layout = decode_layout(
                self._counts,
                layer=self._layer,
                head_dim=self._spec.head_dim,
                max_tokens=self._num_prompt_tokens,
                limit_bytes=self._zone.numel(),
            )
            self._complete(self._layout)

    def _complete(self, layout: PackedLayout) -> None:
        """View and check the layer once its last byte is there."""
        if self._written_bytes < layout.size_bytes:
            return
        packed = view_packed_layer(layout, self._zone[: layout.size_bytes])
        try:
            check_packed_layer(packed, self._num_prompt_tokens)
        except ValueError as error:
            raise self._failed(str(error), "packed") from error
        self.packed = packed

    def _failed(self, message: str, reason: str) -> TransferFailed:
        return TransferFailed(f"layer {self._layer}, packed: {message}", reason=reason)
